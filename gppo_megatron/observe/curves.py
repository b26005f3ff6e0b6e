"""Curves read back from a `metrics.jsonl`."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gppo_megatron.errors import DataError


@dataclass(frozen=True, eq=False)
class Series:
    """One metric of one stage: steps int64 [n], ascending; values float64 [n], NaN where no number was measured."""

    stage: str
    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            raise ValueError(f"{self.name}: {len(self.steps)} steps but {len(self.values)} values")
        if np.any(np.diff(self.steps) <= 0):
            raise ValueError(f"{self.name}: steps must ascend")

    @property
    def known(self) -> NDArray[np.float64]:
        """The values that are numbers."""
        return self.values[np.isfinite(self.values)]

    @property
    def first(self) -> float:
        """The oldest number; NaN, here and below, where there is none."""
        return float(self.known[0]) if len(self.known) else float("nan")

    @property
    def last(self) -> float:
        """The newest number."""
        return float(self.known[-1]) if len(self.known) else float("nan")

    @property
    def lowest(self) -> float:
        return float(self.known.min()) if len(self.known) else float("nan")

    @property
    def highest(self) -> float:
        return float(self.known.max()) if len(self.known) else float("nan")

    def smoothed(self, window: int) -> "Series":
        """The mean over `window` neighbouring points (an odd number), fewer at the ends; NaNs are left out of it."""
        if window < 1 or window % 2 == 0:
            raise ValueError(f"window must be odd and positive, got {window}")
        known = np.isfinite(self.values)
        totals = np.convolve(np.where(known, self.values, 0.0), np.ones(window))
        counts = np.convolve(known.astype(float), np.ones(window))
        middle = slice(window // 2, window // 2 + len(self.values))
        means = np.divide(totals[middle], counts[middle], out=np.full(len(self.values), np.nan), where=known)
        return replace(self, values=means)

    def thinned(self, points: int) -> "Series":
        """At most `points` points: the lowest and the highest of each stretch, so that no spike is lost."""
        if len(self.steps) <= points:
            return self
        kept: set[int] = set()
        for part in np.array_split(np.arange(len(self.steps)), max(1, points // 2)):
            values = self.values[part]
            if np.isfinite(values).any():
                kept |= {int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])}
        index = np.array(sorted(kept), dtype=np.int64)
        return replace(self, steps=self.steps[index], values=self.values[index])


@dataclass(frozen=True)
class Curves:
    """Every series of a run, warm-up first, then by name."""

    series: tuple[Series, ...]

    def find(self, stage: str, name: str) -> Series | None:
        """The series, or None where the run did not measure it."""
        return next((series for series in self.series if (series.stage, series.name) == (stage, name)), None)

    def stage(self, stage: str) -> tuple[Series, ...]:
        return tuple(series for series in self.series if series.stage == stage)


def read_curves(path: Path) -> Curves:
    """Read a `metrics.jsonl`. Of a step written twice (after a resume) the later line counts.

    A last line still being written is left out. Raises DataError for a missing, empty or damaged file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a run writes it from its first step on") from None
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            record = json.loads(line)
            key = str(record.pop("stage")), int(record.pop("step"))
            rows[key] = {name: _number(value) for name, value in record.items()}
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError, ValueError):
            raise DataError(f"{path}, line {number}: not a line of metrics; remove it to read the rest") from None
    if not rows:
        raise DataError(f"{path}: holds no complete step yet; wait for the run's first one")
    return _by_series(rows)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _by_series(rows: dict[tuple[str, int], dict[str, float]]) -> Curves:
    """Turn step -> metrics into one series a metric."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for (stage, step), values in sorted(rows.items()):
        for name, value in values.items():
            points.setdefault((stage, name), []).append((step, value))
    return Curves(
        tuple(
            Series(
                stage,
                name,
                np.array([step for step, _ in points[stage, name]], dtype=np.int64),
                np.array([value for _, value in points[stage, name]], dtype=np.float64),
            )
            for stage, name in sorted(points, key=lambda key: (key[0] != "warmup", key))
        )
    )
