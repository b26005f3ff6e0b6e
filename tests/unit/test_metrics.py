"""Metrics combine the same whatever the split over micro-batches, steps and ranks; `Record` writes the combination."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gppo_megatron.errors import VerifierError
from gppo_megatron.metrics import Last, Max, Mean, StepMetrics, Sum
from gppo_megatron.observe.record import Record
from gppo_megatron.types import Alone

NUMBERS = st.integers(-1000, 1000).map(float)


def measured(value: float, weight: float = 1.0) -> StepMetrics:
    return StepMetrics(
        {"a/sum": Sum(value), "a/mean": Mean(value * weight, weight), "a/max": Max(value), "a/last": Last(value)}
    )


@given(values=st.lists(NUMBERS, min_size=1, max_size=12), cut=st.integers(0, 12))
def test_any_split_combines_to_the_whole(values: list[float], cut: int) -> None:
    left, right = StepMetrics(), StepMetrics()
    for place, value in enumerate(values):
        (left if place < cut else right).merge(measured(value))
    assert left.merge(right).flat() == {
        "a/last": values[-1],
        "a/max": max(values),
        "a/mean": pytest.approx(sum(values) / len(values)),
        "a/sum": sum(values),
    }


def test_means_weigh_by_what_was_counted() -> None:
    assert measured(1.0, weight=3).merge(measured(5.0, weight=1)).flat()["a/mean"] == 2.0
    assert Mean(6.0, 3.0).merge(Mean(0.0, 0.0)).value == 2.0
    assert math.isnan(Mean(0.0, 0.0).value)


def test_numbers_come_sorted_and_merging_leaves_the_other_alone() -> None:
    first, second = StepMetrics({"b/x": Sum(1.0)}), StepMetrics({"a/x": Sum(2.0), "b/x": Sum(3.0)})
    assert first.merge(second) is first
    assert list(first.flat().items()) == [("a/x", 2.0), ("b/x", 4.0)]
    assert second.flat() == {"a/x": 2.0, "b/x": 3.0}
    values = {"a/x": Sum(1.0)}
    StepMetrics(values).add("a/x", Sum(1.0))
    assert values == {"a/x": Sum(1.0)}


def test_time_is_the_slowest_and_is_kept_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 20.0, 21.0, 30.0, 30.5])
    monkeypatch.setattr("gppo_megatron.metrics.time.perf_counter", lambda: next(clock))
    metrics = StepMetrics()
    with metrics.time("update"):
        pass
    with metrics.time("update"):
        pass
    with pytest.raises(KeyError), metrics.time("publish"):
        raise KeyError
    assert metrics.flat() == {"time/publish": 0.5, "time/update": 2.5}


def test_the_largest_of_nothing_is_no_number_and_hides_none() -> None:
    nothing, something = StepMetrics({"a": Max(-math.inf)}), StepMetrics({"a": Max(-3.0)})
    assert math.isnan(nothing.flat()["a"])
    assert nothing.merge(something).flat() == {"a": -3.0}
    assert StepMetrics({"a": Sum(-math.inf)}).flat() == {"a": -math.inf}, "only a maximum can be of nothing"


@dataclass(frozen=True)
class FakeTeam:
    """Every other member's metrics are known beforehand."""

    before: tuple[StepMetrics, ...] = ()
    after: tuple[StepMetrics, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.before)

    @property
    def size(self) -> int:
        return len(self.before) + 1 + len(self.after)

    def gather(self, value: Any) -> list[Any]:
        return [*self.before, value, *self.after]


@dataclass
class Kept:
    """A sink that keeps what it is given."""

    lines: list[tuple[int, str, Mapping[str, float]]] = field(default_factory=list)

    def write(self, step: int, stage: str, values: Mapping[str, float]) -> None:
        self.lines.append((step, stage, values))

    def close(self) -> None:
        pass


def test_a_record_combines_every_rank_once_for_every_sink() -> None:
    sinks, mine = [Kept(), Kept()], measured(4.0, weight=2)
    Record(FakeTeam((measured(1.0),), (measured(10.0), StepMetrics())), "train", sinks)(7, mine)
    expected = {"a/last": 10.0, "a/max": 10.0, "a/mean": pytest.approx(19 / 4), "a/sum": 15.0}
    assert sinks[0].lines == sinks[1].lines == [(7, "train", expected)]
    assert mine.flat() == measured(4.0, weight=2).flat(), "recording again must not count twice"


def test_a_rank_without_sinks_takes_part_in_the_gathering() -> None:
    gathered: list[StepMetrics] = []

    class Listening(FakeTeam):
        def gather(self, value: Any) -> list[Any]:
            gathered.append(value)
            return super().gather(value)

    mine = measured(1.0)
    Record(Listening((measured(2.0),)), "train", [])(1, mine)
    assert gathered == [mine]


def test_speed_is_all_sampled_tokens_over_the_slowest_ranks_step() -> None:
    def rank(tokens: float, seconds: float) -> StepMetrics:
        return StepMetrics(
            {"rollout/sampled_tokens": Sum(tokens), "time/step": Max(seconds), "time/rollout": Max(seconds / 4)}
        )

    sink = Kept()
    Record(FakeTeam((rank(100, 2),)), "train", [sink])(1, rank(300, 4))
    assert sink.lines[0][2]["speed/tokens_per_second"] == 100.0
    assert sink.lines[0][2]["speed/sampled_tokens_per_second"] == 400.0
    assert sink.lines[0][2]["speed/waiting_share"] == 0.25
    Record(Alone(), "warmup", [sink])(1, measured(1.0))
    assert "speed/tokens_per_second" not in sink.lines[1][2]


def test_utilisation_is_all_operations_over_what_all_devices_could_do() -> None:
    def rank(operations: float, seconds: float) -> StepMetrics:
        return StepMetrics({"speed/update_flops": Sum(operations), "time/update": Max(seconds)})

    sink = Kept()
    idle = StepMetrics({"time/update": Max(1.0)})  # of a replica, one process reports
    Record(FakeTeam((rank(6e12, 2.0), idle)), "train", [sink], peak_flops=4e12)(1, rank(3e12, 1.5))
    assert sink.lines[0][2]["speed/mfu"] == pytest.approx(9 / (2.0 * 4 * 3))
    Record(Alone(), "train", [sink])(1, rank(3e12, 1.5))
    assert "speed/mfu" not in sink.lines[1][2], "nothing is said where the peak is not known"


@pytest.mark.parametrize("values", [(1.0, math.nan), (math.nan, 1.0), (math.nan, math.nan)])
def test_a_maximum_keeps_nan_whatever_the_order(values: tuple[float, float]) -> None:
    assert math.isnan(Max(values[0]).merge(Max(values[1])).value)


def verdicts(scored: float, timeouts: float) -> StepMetrics:
    return StepMetrics(
        {
            "rollout/reward": Mean(0.0, scored),
            "rollout/no_score": Sum(timeouts),
            "rollout/verdict_timeout": Sum(timeouts),
            "rollout/verdict_crash": Sum(0.0),
        }
    )


def test_a_step_in_which_every_verifier_failed_is_written_and_ends_the_run() -> None:
    sink = Kept()
    with pytest.raises(VerifierError, match=r"step 3: none of the 12 answers got a verdict \(timeout 12\); try the"):
        Record(FakeTeam(after=(verdicts(0, 8),)), "train", [sink])(3, verdicts(0, 4))
    assert len(sink.lines) == 1
    Record(FakeTeam(after=(verdicts(1, 8),)), "train", [sink])(4, verdicts(0, 4))
    assert len(sink.lines) == 2
