"""The seam to whatever samples tokens: token ids in, token ids and log-probs out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature: > 0; log-probs are those of the tempered distribution that was really sampled.
    max_new_tokens: at least 1.
    stop_ids: sampling of a row ends with (and includes) the first of these.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Request:
    """One response to sample. Equal seeds give equal random numbers, whatever is sampled alongside."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, eq=False)
class Completion:
    """token_ids int64 [n] and logprobs float32 [n] (nats) of the n sampled tokens, the stop token included.

    finish: "stop" or "length". version: the policy version that sampled it.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finish: str
    version: int


class Engine(Protocol):
    """Samples responses from one version of the policy."""

    @property
    def version(self) -> int:
        """The policy version it holds; -1 before the first weights."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order. Raises ValueError for a request it cannot serve."""
        ...


class WeightSink(Protocol):
    """An engine that takes weights tensor by tensor, in this process."""

    @property
    def version(self) -> int: ...

    def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace every parameter; raises SyncError naming parameters missing, unknown or of another shape."""
        ...
