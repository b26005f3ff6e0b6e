"""The likeliest tokens at every place of a batch that is being sampled."""

from collections.abc import Sequence

import numpy as np
import torch

from gppo_megatron.rollout.engine import Request
from gppo_megatron.types import TopTokens


class Likeliest:
    """Keeps the K likeliest tokens of each row and step, on the device; K = 0 keeps nothing.

    Raises ValueError where the requests of one batch ask for different numbers of them.
    """

    def __init__(self, requests: Sequence[Request], width: int, device: torch.device) -> None:
        counts = {request.sampling.top_tokens for request in requests}
        if len(counts) > 1:
            raise ValueError(f"the requests of one batch ask for different numbers of top tokens: {sorted(counts)}")
        (self._count,) = counts
        self._ids = torch.full((len(requests), width, self._count), -1, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(self._ids.shape, dtype=torch.float32, device=device)
        self._rest = torch.zeros(self._ids.shape[:2], dtype=torch.float32, device=device)

    def note(
        self, places: torch.Tensor, step: int, logits: torch.Tensor, temperatures: torch.Tensor, token_ids: torch.Tensor
    ) -> None:
        """places: int64 [n], the rows. logits: [n, vocabulary], not yet over the temperatures [n].

        token_ids: int64 [n], the tokens drawn.
        """
        if self._count == 0:
            return
        logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
        top = logprobs.topk(min(self._count, logits.shape[-1]))
        taken = torch.cat([top.indices, token_ids[:, None]], dim=1)
        here = slice(top.values.shape[1])
        self._ids[places, step, here] = top.indices.to(torch.int32)
        self._logprobs[places, step, here] = top.values
        self._rest[places, step] = logprobs.scatter(1, taken, -torch.inf).logsumexp(dim=1)

    def rows(self, lengths: Sequence[int]) -> list[TopTokens | None]:
        """Of each row, its first `length` steps."""
        if self._count == 0:
            return [None] * len(lengths)
        ids, logprobs, rest = (kept.cpu().numpy() for kept in (self._ids, self._logprobs, self._rest))
        return [
            TopTokens(np.array(ids[row, :length]), np.array(logprobs[row, :length]), np.array(rest[row, :length]))
            for row, length in enumerate(lengths)
        ]
