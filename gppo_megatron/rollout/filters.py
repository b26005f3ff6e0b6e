"""What becomes of a sampled group before it is trained on: answers at the token limit, and groups to leave out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from gppo_megatron.types import Group, Trajectory


class GroupFilter(Protocol):
    """Decides which groups are worth training on."""

    @property
    def name(self) -> str:
        """The reason it stands for, as in the metric `prompts/filtered_<name>`."""
        ...

    def drops(self, group: Group) -> bool: ...


@dataclass(frozen=True)
class NoSignal:
    """Equal rewards, or no answer that carries loss: every gradient of the group would be 0."""

    name: str = "no_signal"

    def drops(self, group: Group) -> bool:
        silent = not any(trajectory.trainable.any() for trajectory in group.trajectories)
        return silent or len(set(group.rewards) - {None}) < 2


@dataclass(frozen=True)
class MeanScore:
    """The mean score, penalties aside, of the answers that have one is outside [low, high]."""

    low: float
    high: float
    name: str = "score"

    def drops(self, group: Group) -> bool:
        scores = [trajectory.verdict.score for trajectory in group.trajectories]
        known = [score for score in scores if score is not None]
        return not known or not self.low <= sum(known) / len(known) <= self.high


@dataclass(frozen=True)
class Unfinished:
    """More than `share` of the answers ended at the token limit."""

    share: float
    name: str = "unfinished"

    def drops(self, group: Group) -> bool:
        cut = sum(trajectory.finish == "length" for trajectory in group.trajectories)
        return cut > self.share * len(group.trajectories)


class Overlong(Protocol):
    """What becomes of an answer that is, or nearly is, too long."""

    def __call__(self, trajectory: Trajectory) -> Trajectory: ...


def as_others(trajectory: Trajectory) -> Trajectory:
    """An `Overlong`: nothing."""
    return trajectory


def masked(trajectory: Trajectory) -> Trajectory:
    """An `Overlong`: an answer cut off at the token limit carries no loss. Its reward stays in the baseline."""
    if trajectory.finish != "length":
        return trajectory
    return replace(trajectory, trainable=np.zeros_like(trajectory.trainable))


@dataclass(frozen=True)
class SoftPenalty:
    """An `Overlong`: arXiv 2503.14476, equation 13, times -weight.

    An answer of n tokens loses weight x (n - (longest - buffer)) / buffer where that is above 0: nothing up to
    longest - buffer tokens, `weight` at `longest`, which is the token limit.
    """

    longest: int
    buffer: int
    weight: float

    def __call__(self, trajectory: Trajectory) -> Trajectory:
        beyond = int(trajectory.trainable.sum()) - (self.longest - self.buffer)
        return replace(trajectory, penalty=self.weight * max(0, beyond) / self.buffer)


@dataclass(frozen=True)
class Sieve:
    """Over-long answers first, then the filters in their order."""

    overlong: Overlong = as_others
    filters: Sequence[GroupFilter] = ()

    def treated(self, group: Group) -> Group:
        return replace(group, trajectories=tuple(self.overlong(trajectory) for trajectory in group.trajectories))

    def reason(self, group: Group) -> str | None:
        """The name of the first filter that drops a treated group; None where it is to be trained on."""
        return next((each.name for each in self.filters if each.drops(group)), None)


def silenced(group: Group) -> Group:
    """A group that takes a place in a batch and nothing else: no tokens but its first, and no loss."""
    return replace(group, trajectories=tuple(_first_token(trajectory) for trajectory in group.trajectories))


def _first_token(trajectory: Trajectory) -> Trajectory:
    return replace(
        trajectory,
        token_ids=trajectory.token_ids[:1],
        sampler_logprobs=trajectory.sampler_logprobs[:1],
        trainable=np.zeros(1, dtype=np.bool_),
        policy_versions=trajectory.policy_versions[:1],
        top=None,
        experts=None,
    )
