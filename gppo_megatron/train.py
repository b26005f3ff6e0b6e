"""The reinforcement-learning loop, and nothing else. What its objects are is decided in `build`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gppo_megatron.data.packing import Packer
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.objective.policy_gradient import Objective
from gppo_megatron.policy.api import Policy, WeightSync
from gppo_megatron.train_state import Resumable
from gppo_megatron.types import Group, TrainBatch


class RolloutSource(Resumable, Protocol):
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
class InTurn:
    """Several actions as one."""

    actions: tuple[Action, ...]

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        for act in self.actions:
            act(step, metrics)


@dataclass(frozen=True)
class Run:
    """One stage of a run. rewards -> advantages is per group; scorers annotate batches before the first update.

    first: the step to begin with; those before it were done by an earlier process. measure: what a step's
    measurements go into.
    """

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
    first: int = 1
    measure: Callable[[int], StepMetrics] = lambda step: StepMetrics()


def train(run: Run) -> None:
    """Collective: every process of the run calls it with its own part of the same stage."""
    run.sync.publish(run.policy.version, run.policy.weights)
    before = run.measure(run.first - 1)
    for act in run.at_start:
        act(run.first - 1, before)
    for step in range(run.first, run.steps + 1):
        metrics = run.measure(step)
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
                run.sync.publish(run.policy.version, run.policy.weights)
        for act in run.after_step:
            act(step, metrics)
