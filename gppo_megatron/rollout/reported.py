"""The likeliest tokens and the experts as a server reported them, in the form that training reads."""

import base64
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.types import TopTokens


def top_tokens(
    reported: Sequence[Mapping[int, float]], token_ids: Sequence[int], logprobs: Sequence[float], count: int, vocab: int
) -> TopTokens:
    """The `count` likeliest at each of n places. token_ids, logprobs: what was sampled there.

    Raises ValueError for a place of which too few tokens were reported.
    """
    ids = np.full((len(token_ids), count), -1, np.int32)
    values = np.zeros(ids.shape, np.float32)
    rest = np.full(len(token_ids), -np.inf, np.float32)
    wanted = min(count, vocab)
    for place, (likely, sampled, logprob) in enumerate(zip(reported, token_ids, logprobs, strict=True)):
        # Equally likely ones in the order of their ids, as `torch.topk` gives them on a CPU.
        best = sorted(likely.items(), key=lambda pair: (-pair[1], pair[0]))[:wanted]
        if len(best) < wanted:
            raise ValueError(f"{len(best)} likely tokens instead of {wanted}")
        ids[place, :wanted] = [token for token, _ in best]
        values[place, :wanted] = [value for _, value in best]
        left = 1.0 - math.fsum(math.exp(value) for value in (dict(best) | {sampled: logprob}).values())
        if wanted < vocab and left > 0:
            rest[place] = math.log(left)
    return TopTokens(ids, values, rest)


def experts_of(text: str, tokens: int, model: Architecture) -> NDArray[np.int16]:
    """int16 [tokens, layers, k], as `Trajectory.experts`, of what SGLang reports.

    text: base64 of int32 [tokens - 1, layers, k]: it has no row of the last token, and zeros in layers without experts.
    Raises ValueError where it is anything else.
    """
    if model.experts is None:
        raise ValueError("experts of a model without experts")
    shape = (tokens - 1, model.layers, model.experts.per_token)
    read = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    if read.size != math.prod(shape):
        raise ValueError(f"{read.size} experts instead of {' x '.join(map(str, shape))}")
    sparse = [layer for layer in range(model.layers) if model.experts_in(layer)]
    chosen = read.reshape(shape)[:, sparse]
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < model.experts.count:
        raise ValueError(f"an expert that is none of {model.experts.count}: {chosen.min()} or {chosen.max()}")
    experts = np.full((tokens, *shape[1:]), -1, np.int16)
    experts[:-1, sparse] = chosen
    return experts
