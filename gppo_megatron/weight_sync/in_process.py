"""Weights for an engine that lives in the policy's own process."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from gppo_megatron.errors import SyncError


class Sink(Protocol):
    """What takes the weights, tensor by tensor; raises SyncError where they do not fit."""

    @property
    def version(self) -> int: ...

    def load(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...


@dataclass(frozen=True)
class InProcess:
    """A WeightSync: every process feeds its own engine, which holds the whole model."""

    sink: Sink

    def publish(self, version: int, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        """Collective, since `weights` is. Raises SyncError where the engine does not hold `version` afterwards."""
        self.sink.load(version, weights())
        if self.sink.version != version:
            raise SyncError(
                f"the engine holds version {self.sink.version} of the weights after version {version} was sent"
            )


@dataclass(frozen=True)
class Withheld:
    """A WeightSync for stages in which nothing samples from the policy: no weight is moved."""

    def publish(self, version: int, weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> None:
        """Leaves `weights` untouched."""
