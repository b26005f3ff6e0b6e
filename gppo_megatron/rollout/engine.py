"""The seam to whatever samples tokens: token ids in, token ids and log-probs out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from gppo_megatron.types import TopTokens


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature: > 0; log-probs are those of the tempered distribution that was really sampled.
    max_new_tokens: at least 1.
    stop_ids: sampling of a row ends with (and includes) the first of these.
    top_tokens: how many of the likeliest tokens to report at every place; 0 for none.
    experts: whether to report which experts each token went to.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    top_tokens: int = 0
    experts: bool = False

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

    versions: int64 [n], the policy version that sampled each token; weights may change in the middle of a response.
    finish: "stop" or "length". top: of the n tokens, where `Sampling.top_tokens` is not 0.
    experts: int16 [prompt + n, layers, k], where `Sampling.experts` is set: what `Trajectory.experts` says.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    finish: str
    top: TopTokens | None = None
    experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"{len(self.token_ids)} tokens with {len(self.logprobs)} log-probs and {len(self.versions)} versions"
            )
        if self.finish not in {"stop", "length"}:
            raise ValueError(f"finish must be 'stop' or 'length', got {self.finish!r}")


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
