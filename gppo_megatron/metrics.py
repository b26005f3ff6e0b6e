"""Metric values that know how they combine, over micro-batches, optimizer steps and ranks alike."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

Number = TypeVar("Number")  # float, or a 0-dimensional tensor not yet read from the device


@dataclass(frozen=True)
class Sum(Generic[Number]):
    """Adds up."""

    value: Number

    def merge(self, other: "Sum[Number]") -> "Sum[Number]":
        return Sum(self.value + other.value)  # type: ignore[operator]


@dataclass(frozen=True)
class Mean(Generic[Number]):
    """A weighted mean, kept as total and weight so that it combines without bias."""

    total: Number
    weight: Number

    @property
    def value(self) -> float:
        """The mean; NaN where nothing was measured."""
        weight = float(self.weight)  # type: ignore[arg-type]
        return float(self.total) / weight if weight else float("nan")  # type: ignore[arg-type]

    def merge(self, other: "Mean[Number]") -> "Mean[Number]":
        return Mean(self.total + other.total, self.weight + other.weight)  # type: ignore[operator]


@dataclass(frozen=True)
class Max(Generic[Number]):
    """The largest; NaN once anything is NaN, -inf where nothing was measured."""

    value: Number

    def merge(self, other: "Max[Number]") -> "Max[Number]":
        # NaN is the one value that differs from itself.
        return other if other.value > self.value or other.value != other.value else self  # type: ignore[operator]


@dataclass(frozen=True)
class Last(Generic[Number]):
    """The most recent; the same on every rank."""

    value: Number

    def merge(self, other: "Last[Number]") -> "Last[Number]":
        return other


Metric = Sum[Number] | Mean[Number] | Max[Number] | Last[Number]


class StepMetrics:
    """What one step measured: name -> metric. Names are `group/what`, e.g. `rollout/reward`, `time/update`."""

    def __init__(
        self, values: Mapping[str, Metric[float]] | None = None, entering: Callable[[str], None] = lambda phase: None
    ) -> None:
        """entering: told the name of each timed phase as it begins."""
        self._values: dict[str, Metric[float]] = dict(values or {})
        self._entering = entering

    def __reduce__(self) -> tuple[type["StepMetrics"], tuple[dict[str, Metric[float]]]]:
        """Other processes get the values alone."""
        return StepMetrics, (self._values,)

    def add(self, name: str, metric: Metric[float]) -> None:
        """Record `metric`, combined with what `name` already holds."""
        held = self._values.get(name)
        self._values[name] = metric if held is None else held.merge(metric)  # type: ignore[arg-type]

    def merge(self, other: "StepMetrics") -> Self:
        """Combine every metric of `other` into this one."""
        for name, metric in other.items():
            self.add(name, metric)
        return self

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Record the seconds spent inside as `time/<name>`: the slowest rank's."""
        self._entering(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(f"time/{name}", Max(time.perf_counter() - start))

    def items(self) -> Iterator[tuple[str, Metric[float]]]:
        return iter(self._values.items())

    def flat(self) -> dict[str, float]:
        """name -> number, sorted by name; NaN where nothing was measured."""
        return {name: _number(metric) for name, metric in sorted(self._values.items())}


def _number(metric: Metric[float]) -> float:
    value = float(metric.value)
    return math.nan if isinstance(metric, Max) and value == -math.inf else value
