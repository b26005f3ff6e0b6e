"""The reinforcement-learning loop, and nothing else. What its objects are is decided in `build`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gppo_megatron.data.packing import Packer
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.objective.policy_gradient import Objective
from gppo_megatron.policy.api import Policy, WeightSync
from gppo_megatron.types import Group, TrainBatch


class RolloutSource(Protocol):
    """Where groups of judged trajectories come from."""

    def next_groups(self, step: int, metrics: StepMetrics) -> list[Group]:
        """Collective: this data-parallel rank's share of the step's groups."""
        ...


class Action(Protocol):
    """Something done between steps: evaluate, save, record."""

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        """Collective: `metrics` are this rank's measurements of the step, open to additions."""
        ...


@dataclass(frozen=True)
class Every:
    """`action` on every `interval`-th step and on step `last`."""

    interval: int
    last: int
    action: Action

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        if step % self.interval == 0 or step == self.last:
            self.action(step, metrics)


@dataclass(frozen=True)
class Run:
    """One stage of a run. rewards -> advantages is per group; scorers annotate batches before the first update."""

    steps: int
    policy: Policy
    objective: Objective
    rollouts: RolloutSource
    advantage: Callable[[tuple[float | None, ...]], tuple[float | None, ...]]
    packer: Packer
    scorers: tuple[Callable[[TrainBatch], TrainBatch], ...]
    sync: WeightSync
    at_start: tuple[Action, ...]
    after_step: tuple[Action, ...]


def train(run: Run) -> None:
    """Collective: every process of the run calls it with its own part of the same stage."""
    run.sync.publish(run.policy.version, run.policy.weights())
    before = StepMetrics()
    for act in run.at_start:
        act(0, before)
    for step in range(1, run.steps + 1):
        metrics = StepMetrics()
        with metrics.time("step"):
            with metrics.time("rollout"):
                groups = run.rollouts.next_groups(step, metrics)
            batches = run.packer.pack(groups, [run.advantage(group.rewards) for group in groups])
            for scorer in run.scorers:  # all batches, before the first update moves the policy
                batches = [scorer(batch) for batch in batches]
            with metrics.time("update"):
                for batch in batches:
                    metrics.merge(run.policy.update(batch, run.objective))
            with metrics.time("publish"):
                run.sync.publish(run.policy.version, run.policy.weights())
        for act in run.after_step:
            act(step, metrics)
