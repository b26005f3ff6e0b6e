"""Charts as inline SVG, coloured by the page's CSS classes c0 to c4."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from gppo_megatron.observe.curves import Series
from gppo_megatron.observe.panels import Chart, smoothing_window

WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 44
MAX_POINTS = 600


@dataclass(frozen=True)
class Axis:
    """Maps [low, high] (low < high) linearly, or by logarithm (0 < low), to the pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"an axis cannot span [{self.low}, {self.high}]{' by logarithm' if self.log else ''}")

    def place(self, value: float) -> float:
        """The pixel of `value`."""
        low, high, here = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return self.start + (here - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside the axis, about five; by logarithm powers of ten, or 1-2-5 steps where those are few."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            powers = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
            if len(powers) >= 3:
                return powers[:: math.ceil(len(powers) / 6)]
            tens = range(math.floor(low), math.floor(high) + 1)
            fine = [digit * 10.0**power for power in tens for digit in (1, 2, 5)]
            inside = [value for value in fine if self.low <= value <= self.high]
            if len(inside) >= 2:
                return inside
        raw = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(raw))
        step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if raw <= unit * factor * (1 + 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def value_axis(chart: Chart) -> Axis:
    """The y axis: the panel's limits, or the data's range with a margin; by logarithm only where all is above 0."""
    start, end = HEIGHT - BOTTOM, TOP
    values = np.concatenate([series.values for series in chart.series])
    finite = values[np.isfinite(values)]
    if chart.panel.limits is not None:
        return Axis(*chart.panel.limits, start, end)
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if chart.panel.log and low > 0:
        return Axis(low / 1.3, high * 1.3, start, end, log=True)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(low - margin, high + margin, start, end)


def step_axis(chart: Chart) -> Axis:
    """The x axis, from the first to the last step of any series."""
    low = min(int(series.steps[0]) for series in chart.series)
    high = max(int(series.steps[-1]) for series in chart.series)
    return Axis(low, max(high, low + 1), LEFT, WIDTH - RIGHT)


def number(value: float) -> str:
    """Four significant digits, without noise."""
    return f"{value:.4g}"


def draw(chart: Chart) -> str:
    """One <svg>; its `data-chart` holds the points for the page's tooltip."""
    x, y = step_axis(chart), value_axis(chart)
    thinned = [series.thinned(MAX_POINTS) for series in chart.series]
    label = f"{chart.panel.title}, {chart.panel.unit}, by {chart.step_label}"
    shapes = _frame(chart, x, y)
    for index, (line, series) in enumerate(zip(chart.panel.lines, chart.series, strict=True)):
        shapes += _curve(series, index % 4, x, y, line.sparse)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}" '
        f'data-chart="{escape(_points(chart, thinned, x))}">{"".join(shapes)}'
        f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/></svg>'
    )


def _frame(chart: Chart, x: Axis, y: Axis) -> list[str]:
    """Grid, tick labels and axis labels."""
    bottom, right, middle = HEIGHT - BOTTOM, WIDTH - RIGHT, (TOP + HEIGHT - BOTTOM) / 2
    shapes = []
    for value in y.ticks():
        place = y.place(value)
        shapes.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{place:.1f}" y2="{place:.1f}"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in (tick for tick in x.ticks() if tick == round(tick)):
        place = x.place(value)
        shapes.append(f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        shapes.append(f'<text x="{place:.1f}" y="{bottom + 17}" text-anchor="middle">{value:.0f}</text>')
    shapes.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    shapes.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{chart.step_label}</text>')
    unit = escape(chart.panel.unit)
    shapes.append(f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{unit}</text>')
    return shapes


def _curve(series: Series, color: int, x: Axis, y: Axis, sparse: bool) -> list[str]:
    """The raw points, faint under their running mean where there are many; markers where they are few."""
    window = 1 if sparse else smoothing_window(len(series.values))
    shapes = []
    if window > 1:
        shapes.append(f'<path class="raw c{color}" d="{_path(series.thinned(MAX_POINTS), x, y)}"/>')
    mean = series.smoothed(window).thinned(MAX_POINTS)
    shapes.append(f'<path class="c{color}" d="{_path(mean, x, y)}"/>')
    if sparse or len(series.values) == 1:
        shapes += [
            f'<circle class="c{color}" cx="{x.place(step):.1f}" cy="{y.place(value):.1f}" r="3.5"/>'
            for step, value in zip(series.steps, series.values, strict=True)
            if math.isfinite(value)
        ]
    return shapes


def _path(series: Series, x: Axis, y: Axis) -> str:
    """SVG path commands; a missing number lifts the pen."""
    commands, pen = [], "M"
    for step, value in zip(series.steps, series.values, strict=True):
        if math.isfinite(value):
            commands.append(f"{pen}{x.place(step):.1f} {y.place(value):.1f}")
        pen = "L" if math.isfinite(value) else "M"
    return "".join(commands)


def _points(chart: Chart, thinned: Sequence[Series], x: Axis) -> str:
    """What the tooltip needs, as JSON."""
    lines = [
        {
            "label": line.label,
            "steps": series.steps.tolist(),
            "values": [number(value) if math.isfinite(value) else "none" for value in series.values],
        }
        for line, series in zip(chart.panel.lines, thinned, strict=True)
    ]
    return json.dumps({"low": x.low, "high": x.high, "left": x.start, "right": x.end, "lines": lines})
