"""The loop, by the order in which it calls its parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from gppo_verifiers.types import Task

from gppo_megatron.metrics import Last, StepMetrics, Sum
from gppo_megatron.train import Every, Run, train
from gppo_megatron.types import Group, Prompt

UPDATES = 2


@dataclass
class Parts:
    """Every part of a run at once: each call is noted. A batch is a string of what was done to it."""

    calls: list[Any] = field(default_factory=list)
    version: int = 10
    seen: list[tuple[int, StepMetrics]] = field(default_factory=list)

    def weights(self) -> Iterator[str]:
        return iter([f"weights {self.version}"])

    def publish(self, version: int, weights: Callable[[], Iterator[str]]) -> None:
        self.calls.append(("publish", version, *weights()))

    def next_groups(self, step: int, metrics: StepMetrics) -> list[Group]:
        metrics.add("rollout/step", Last(float(step)))
        self.calls.append(("rollout", step))
        return [Group(Prompt(str(step), (1,), Task("none")), ())]

    def advantage(self, rewards: tuple[float | None, ...]) -> tuple[float | None, ...]:
        assert rewards == ()
        return (0.5,)

    def pack(self, groups: list[Group], advantages: list[tuple[float, ...]]) -> list[str]:
        assert advantages == [(0.5,)]
        return [f"{groups[0].prompt.id}{letter}" for letter in "ab"[:UPDATES]]

    def score(self, batch: str) -> str:
        self.calls.append(("score", batch, self.version))
        return f"{batch}*"

    def update(self, batch: str, objective: str) -> StepMetrics:
        self.calls.append(("update", batch, objective))
        self.version += 1
        return StepMetrics({"policy/tokens": Sum(1.0)})

    def act(self, step: int, metrics: StepMetrics) -> None:
        self.calls.append(("act", step))
        self.seen.append((step, metrics))


def run_of(parts: Any, steps: int) -> Run:
    return Run(
        steps=steps,
        policy=parts,
        objective="objective",  # type: ignore[arg-type]
        rollouts=parts,
        advantage=parts.advantage,
        packer=parts,
        scorers=(parts.score, parts.score),
        sync=parts,
        at_start=(parts.act, parts.act),
        after_step=(parts.act,),
    )


def test_the_order_of_a_step() -> None:
    parts = Parts()
    train(run_of(parts, 2))
    assert parts.calls == [
        ("publish", 10, "weights 10"), ("act", 0), ("act", 0),
        ("rollout", 1),
        ("score", "1a", 10), ("score", "1b", 10), ("score", "1a*", 10), ("score", "1b*", 10),
        ("update", "1a**", "objective"), ("update", "1b**", "objective"),
        ("publish", 12, "weights 12"), ("act", 1),
        ("rollout", 2),
        ("score", "2a", 12), ("score", "2b", 12), ("score", "2a*", 12), ("score", "2b*", 12),
        ("update", "2a**", "objective"), ("update", "2b**", "objective"),
        ("publish", 14, "weights 14"), ("act", 2),
    ]  # fmt: skip


def test_actions_at_the_start_share_one_measurement_and_every_step_has_its_own() -> None:
    parts = Parts()
    train(run_of(parts, 2))
    (_, first), (_, second), (_, step_1), (_, step_2) = parts.seen
    assert first is second
    assert len({id(metrics) for metrics in (first, step_1, step_2)}) == 3
    assert first.flat() == {}
    values = [metrics.flat() for metrics in (step_1, step_2)]
    assert [each["rollout/step"] for each in values] == [1, 2]
    assert [each["policy/tokens"] for each in values] == [UPDATES, UPDATES]
    for each in values:
        phases = [each[f"time/{name}"] for name in ("rollout", "update", "publish")]
        assert each["time/step"] >= sum(phases)


def test_a_run_of_no_steps_publishes_and_measures() -> None:
    parts = Parts()
    train(run_of(parts, 0))
    assert parts.calls == [("publish", 10, "weights 10"), ("act", 0), ("act", 0)]


def test_without_scorers_batches_go_straight_to_the_policy() -> None:
    parts = Parts()
    train(replace(run_of(parts, 1), scorers=()))
    assert [call[1] for call in parts.calls if call[0] == "update"] == ["1a", "1b"]


@pytest.mark.parametrize(
    ("interval", "last", "expected"),
    [(3, 7, [3, 6, 7]), (3, 6, [3, 6]), (1, 3, [1, 2, 3]), (9, 5, [5]), (8, 8, [8]), (20, 20, [])],
)
def test_every_acts_on_its_steps_and_on_the_last(interval: int, last: int, expected: list[int]) -> None:
    parts = Parts()
    action = Every(interval, last, parts.act)
    metrics = StepMetrics()
    for step in range(1, min(last, 10) + 1):
        action(step, metrics)
    assert [step for step, _ in parts.seen] == expected
    assert all(given is metrics for _, given in parts.seen)
