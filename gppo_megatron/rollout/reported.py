"""The likeliest tokens as a server reported them, in the form that training reads."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

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
