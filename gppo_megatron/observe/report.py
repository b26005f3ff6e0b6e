"""What a run leaves for the eye: a picture, and a page that needs no network."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Protocol

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from gppo_megatron.observe.curves import Curves, Series, read_curves
from gppo_megatron.observe.page import PAGE
from gppo_megatron.observe.panels import (
    MAIN_PANELS,
    MORE_PANELS,
    OTHER_PANELS,
    WARMUP_PANELS,
    Chart,
    charts_of,
    remaining_charts,
    smoothing_window,
)
from gppo_megatron.observe.svg import draw, number, value_axis

COLORS = ("#2563c9", "#d4690a", "#16885c", "#9142b8", "#b5323f")
COLUMNS = 3
HEADLINES = (
    ("rollout/reward", "reward"),
    ("evaluation/accuracy", "held-out accuracy"),
    ("policy/entropy", "entropy, nats"),
    ("divergence/mean", "mean divergence"),
    ("policy/sampler_gap", "sampler gap, nats"),
)


class Sample(Protocol):
    """One answer to show, as text. score: None where the verifier gave none."""

    @property
    def prompt(self) -> str: ...

    @property
    def answer(self) -> str: ...

    @property
    def score(self) -> float | None: ...


def write_png(metrics_path: Path, png_path: Path) -> None:
    """Draw a run's main curves, three charts a row, 1350 x 330 pixels each row. Raises DataError without metrics."""
    curves = read_curves(metrics_path)
    charts = charts_of(curves, "train", MAIN_PANELS + MORE_PANELS) + charts_of(curves, "warmup", WARMUP_PANELS)
    rows = max(1, math.ceil(len(charts) / COLUMNS))
    figure = Figure(figsize=(13.5, 3.3 * rows), dpi=100, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    for place, chart in enumerate(charts, start=1):
        _plot(figure.add_subplot(rows, COLUMNS, place), chart)
    figure.savefig(png_path, format="png")


def _plot(axes: Any, chart: Chart) -> None:
    """Draw one chart; a warm-up's stands on a tinted ground."""
    for line, series, color in zip(chart.panel.lines, chart.series, COLORS, strict=False):
        window = 1 if line.sparse else smoothing_window(len(series.values))
        if window > 1:
            axes.plot(series.steps, series.values, color=color, alpha=0.25, linewidth=1)
        smooth = series.smoothed(window)
        marker = "o" if line.sparse or len(series.values) == 1 else None
        axes.plot(
            smooth.steps, smooth.values, color=color, linewidth=1.8, marker=marker, markersize=4, label=line.label
        )
    y = value_axis(chart)
    axes.set_yscale("log" if y.log else "linear")
    axes.set_ylim(y.low, y.high)
    axes.minorticks_off()
    axes.set_yticks(y.ticks(), labels=[number(tick) for tick in y.ticks()])
    axes.set_title(("Warm-up: " if chart.stage == "warmup" else "") + chart.panel.title, fontsize=11, loc="left")
    axes.set_xlabel(chart.step_label, fontsize=9)
    axes.set_ylabel(chart.panel.unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.stage == "warmup":
        axes.set_facecolor("#f4f1e8")
    if len(chart.series) > 1:
        axes.legend(fontsize=8, framealpha=0.7)


def write_html(
    metrics_path: Path, html_path: Path, title: str, config_text: str, samples: Sequence[Sample] = ()
) -> None:
    """Write one page with every curve, final values, `samples` and the resolved config. Raises DataError."""
    curves = read_curves(metrics_path)
    page = Template(PAGE).substitute(
        title=escape(title),
        headlines=_headlines(curves),
        sections="".join(_section(curves, stage) for stage in ("train", "warmup")),
        samples=_samples(samples),
        values="".join(_values(curves, stage) for stage in ("train", "warmup")),
        config=escape(config_text),
    )
    html_path.write_text(page, encoding="utf-8")


def _headlines(curves: Curves) -> str:
    """The first and last values that tell how a run went."""
    tiles = []
    for name, label in HEADLINES:
        series = curves.find("train", name)
        if series is not None:
            tiles.append(
                f'<div class="tile"><span>{escape(label)}</span><b>{number(series.last)}</b>'
                f"<span>from {number(series.first)}</span></div>"
            )
    return "".join(tiles)


def _section(curves: Curves, stage: str) -> str:
    """A stage's charts: the main ones open, all others folded."""
    if not curves.stage(stage):
        return ""
    main = charts_of(curves, stage, WARMUP_PANELS if stage == "warmup" else MAIN_PANELS)
    more = charts_of(curves, stage, MORE_PANELS + OTHER_PANELS)
    rest = more + remaining_charts(curves, stage, main + more)
    steps = max(int(series.steps[-1]) for series in curves.stage(stage))
    folded = f"<details><summary>{len(rest)} more charts</summary>{_grid(rest)}</details>" if rest else ""
    heading = "Warm-up" if stage == "warmup" else "Training"
    return f'<section class="{stage}"><h2>{heading}, {steps} steps</h2>{_grid(main)}{folded}</section>'


def _grid(charts: Sequence[Chart]) -> str:
    return f'<div class="grid">{"".join(map(_figure, charts))}</div>' if charts else ""


def _figure(chart: Chart) -> str:
    """A chart under its title and, for several lines, its legend."""
    keys = "".join(
        f'<span class="key"><i class="c{index % 4}"></i>{escape(line.label)}</span>'
        for index, line in enumerate(chart.panel.lines)
    )
    legend = f"<div>{keys if len(chart.series) > 1 else ''}</div>"
    return f"<figure><figcaption><b>{escape(chart.panel.title)}</b>{legend}</figcaption>{draw(chart)}</figure>"


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    rows = "".join(
        f"<tr><td><pre>{escape(sample.prompt)}</pre></td><td><pre>{escape(sample.answer)}</pre></td>"
        f'<td class="number">{"none" if sample.score is None else number(sample.score)}</td></tr>'
        for sample in samples
    )
    head = '<tr><th>prompt</th><th>answer</th><th class="number">score</th></tr>'
    return f'<section><h2>Sample answers</h2><div class="wide"><table>{head}{rows}</table></div></section>'


def _values(curves: Curves, stage: str) -> str:
    """A table of every metric of a stage."""
    rows = "".join(_row(series) for series in curves.stage(stage))
    if not rows:
        return ""
    head = "".join(f'<th class="number">{name}</th>' for name in ("first", "last", "lowest", "highest", "points"))
    caption = "Warm-up" if stage == "warmup" else "Training"
    return f"<table><caption>{caption}</caption><tr><th>metric</th>{head}</tr>{rows}</table>"


def _row(series: Series) -> str:
    numbers = (*map(number, (series.first, series.last, series.lowest, series.highest)), str(len(series.values)))
    cells = "".join(f'<td class="number">{cell}</td>' for cell in numbers)
    return f"<tr><td>{escape(series.name)}</td>{cells}</tr>"
