"""All that the train loop may know about the policy and about carrying its weights."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from gppo_megatron.metrics import StepMetrics
from gppo_megatron.objective.policy_gradient import Objective
from gppo_megatron.types import TrainBatch


class NamedTensor(NamedTuple):
    """A full (unsharded) parameter under its Hugging Face name."""

    name: str
    tensor: torch.Tensor


class Policy(Protocol):
    """A trainable language model spread over this run's processes."""

    @property
    def version(self) -> int:
        """Optimizer steps taken since the weights were loaded."""
        ...

    def update(self, batch: TrainBatch, objective: Objective) -> StepMetrics:
        """Collective: one optimizer step on `batch`; afterwards `version` is one higher, unless the gradient was not
        finite and the step was skipped."""
        ...

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Collective: `batch` with this policy's own log-probs as the anchor."""
        ...

    def weights(self) -> Iterator[NamedTensor]:
        """Collective: every parameter in full, in the same order on every process; consume it to the end."""
        ...


class WeightSync(Protocol):
    """Makes the rollout engines sample from the policy's current weights."""

    def publish(self, version: int, weights: Callable[[], Iterator[NamedTensor]]) -> None:
        """Collective: hand the weights to every engine, then check that each one holds `version`.

        weights: begins a walk through all of them, which is collective; a second one where the first did not arrive.
        """
        ...
