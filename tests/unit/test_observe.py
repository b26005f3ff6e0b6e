"""What the sinks write is checked as text, as events and as pixels, not by asking the sinks."""

import io
import json
import math
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from gppo_megatron.errors import DataError
from gppo_megatron.observe.console import Console, Trend, curve, duration, wrap
from gppo_megatron.observe.curves import Series, read_curves
from gppo_megatron.observe.jsonl import JsonLines
from gppo_megatron.observe.panels import MAIN_PANELS, MORE_PANELS, OTHER_PANELS, WARMUP_PANELS
from gppo_megatron.observe.report import COLORS, write_html, write_png
from gppo_megatron.observe.sinks import Sink, is_timing
from gppo_megatron.observe.svg import Axis
from gppo_megatron.observe.tensorboard import TensorBoard


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Shown:
    prompt: str
    answer: str
    score: float | None


FULL_STEP = {
    "rollout/reward": 0.5,
    "evaluation/accuracy": 0.83,
    "policy/entropy": 0.4321,
    "kept/positive": 0.98,
    "kept/negative": 0.9512,
    "divergence/mean": 0.00123,
    "ratio/max": 3.456,
    "policy/sampler_gap": 2.5e-6,
    "policy/non_finite": 0.0,
    "rollout/no_score": 2.0,
    "speed/tokens_per_second": 12345.6,
    "time/rollout": 0.42,
    "time/update": 0.3,
    "time/step": 0.8,
}


def write_run(path: Path, steps: int = 60) -> None:
    sink = JsonLines(path)
    for step in range(1, 31):
        sink.write(step, "warmup", {"policy/nll": 2.0 / step})
    sink.write(0, "train", {"evaluation/accuracy": 0.25})
    for step in range(1, steps + 1):
        values = {
            "rollout/reward": step / steps,
            "ratio/max": 1.5 + step % 7,
            "kept/negative": math.nan,
            "odd/one": 3.0,
        }
        sink.write(step, "train", {**values, **({"evaluation/accuracy": 0.75} if step % 20 == 0 else {})})
    sink.close()


# --- metrics.jsonl -------------------------------------------------------------------------------------------------


def test_json_line_is_exact(tmp_path: Path) -> None:
    sink: Sink = JsonLines(tmp_path / "metrics.jsonl")
    sink.write(3, "train", {"policy/nll": math.nan, "b": -math.inf, "a": 0.1 + 0.2})
    text = (tmp_path / "metrics.jsonl").read_text()  # before close: the line must be out already
    sink.close()
    assert text == '{"a": 0.30000000000000004, "b": null, "policy/nll": null, "stage": "train", "step": 3}\n'


@given(st.dictionaries(st.text(min_size=1), st.floats(), max_size=5))
def test_json_is_strict_and_round_trips(tmp_path_factory: pytest.TempPathFactory, values: dict[str, float]) -> None:
    values = {"group/" + name: value for name, value in values.items()}
    path = tmp_path_factory.mktemp("jsonl") / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write(1, "train", values)
    sink.close()

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    [line] = path.read_text(encoding="utf-8").splitlines()
    read = json.loads(line, parse_constant=refuse)
    assert (read.pop("stage"), read.pop("step")) == ("train", 1)
    assert read == {name: value if math.isfinite(value) else None for name, value in values.items()}


def test_same_numbers_in_another_order_give_the_same_bytes(tmp_path: Path) -> None:
    for name, items in (("a", list(FULL_STEP.items())), ("b", list(reversed(FULL_STEP.items())))):
        sink = JsonLines(tmp_path / name)
        sink.write(1, "train", dict(items))
        sink.close()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_reopening_appends_and_drops_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"x": 1.0, "stage": "train", "step": 1}\n{"x": 2.0, "sta')
    sink = JsonLines(path)
    sink.write(2, "train", {"x": 5.0})
    sink.close()
    assert [json.loads(line)["x"] for line in path.read_text().splitlines()] == [1.0, 5.0]


def test_a_metric_cannot_overwrite_the_step(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="no metric may be called step"):
        sink.write(1, "train", {"step": 2.0})
    sink.close()


def test_timing_metrics_are_the_ones_a_seed_does_not_fix() -> None:
    assert {name for name in FULL_STEP if is_timing(name)} == {
        "time/rollout",
        "time/update",
        "time/step",
        "speed/tokens_per_second",
    }


# --- console -------------------------------------------------------------------------------------------------------


def test_what_could_not_be_measured_is_not_shown() -> None:
    stream = io.StringIO()
    console = Console(stream, {"train": 1}, width=100, clock=Clock())
    console.write(1, "train", {"policy/entropy": 0.5, "kept/positive": math.nan, "rollout/reward": math.nan})
    assert "entropy 0.500" in stream.getvalue()
    assert "nan" not in stream.getvalue()


def test_a_record_shows_everything_of_a_step() -> None:
    stream = io.StringIO()
    Console(stream, {"train": 200}, width=120, clock=Clock()).write(1, "train", FULL_STEP)
    first, second = stream.getvalue().splitlines()
    assert first == (
        "train   1/200  reward 0.500 |+|  no score 2  left 2:39  held-out 0.83  entropy 0.432  kept+ 0.980  kept- 0.951"
    )
    assert second == "    divergence 1.2e-03  ratio max 3.46  gap 2.5e-06  12,346 tok/s  rollout 0.42s  update 0.30s"


def test_warm_up_shows_what_it_has_and_nothing_else() -> None:
    stream = io.StringIO()
    console = Console(stream, {"warmup": 20}, width=100, clock=Clock())
    console.write(1, "warmup", {"policy/nll": 2.34567, "speed/tokens_per_second": 9000.0})
    assert stream.getvalue() == "warmup  1/20  nll 2.346  9,000 tok/s\n"


def test_without_a_terminal_lines_come_by_steps_seconds_evaluations_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, {"train": 34}, width=100, clock=clock)
    for step in range(1, 35):
        clock.now += 11.0 if step == 15 else 0.1
        console.write(step, "train", {"evaluation/accuracy": 0.5} if step == 23 else {"policy/entropy": 1.0})
    console.close()
    assert re.findall(r"^train +(\d+)/34", stream.getvalue(), re.MULTILINE) == ["1", "10", "15", "20", "23", "30", "34"]
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_the_line_is_rewritten_and_records_stay() -> None:
    stream = Terminal()
    console = Console(stream, {"train": 40}, width=80, clock=Clock())
    for step in range(8, 12):
        console.write(step, "train", {"policy/entropy": float(step)})
    console.close()
    assert stream.getvalue() == (
        "train  8/40  entropy 8.000"
        "\r\x1b[2Ktrain  9/40  left 0:00  entropy 9.000"
        "\r\x1b[2Ktrain 10/40  left 0:00  entropy 10.000\n"
        "train 11/40  left 0:00  entropy 11.000\n"
    )


def test_a_new_stage_starts_on_a_fresh_line_with_its_own_curve() -> None:
    stream = Terminal()
    console = Console(stream, {}, width=80, clock=Clock())
    console.write(1, "warmup", {"rollout/reward": 0.0})
    console.write(1, "train", {"rollout/reward": 1.0})
    assert stream.getvalue() == "warmup 1  reward 0.000 |▁|\ntrain 1  reward 1.000 |█|"


@pytest.mark.parametrize("width", [40, 80, 100, 120])
def test_no_line_exceeds_the_width(width: int) -> None:
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        console = Console(stream, {"train": 200}, width=width, clock=Clock())
        for step in (11, 12):
            console.write(step, "train", FULL_STEP)
    lines = re.split(r"\n|\r\x1b\[2K", plain.getvalue() + terminal.getvalue())
    assert max(map(len, lines)) <= width
    for piece in ("held-out 0.83", "divergence 1.2e-03", "update 0.30s"):
        assert piece in plain.getvalue()


def test_time_left_follows_the_pace() -> None:
    stream, clock = io.StringIO(), Clock()
    console = Console(stream, {"train": 110}, width=100, clock=clock)
    console.write(0, "train", {"evaluation/accuracy": 0.25})
    clock.now += 40.0  # 4 s a step for 10 steps leaves 100 steps of 4 s
    console.write(10, "train", {})
    assert stream.getvalue().splitlines() == ["train   0/110  held-out 0.25", "train  10/110  left 6:40"]


def test_curve_averages_a_long_run_into_its_cells() -> None:
    assert curve([0.0, 0.5, 1.0], " _-#") == "_-#"
    assert curve([0.0] * 80 + [1.0] * 80, " _-#") == "_" * 8 + "#" * 8
    assert curve([0.0, math.nan, 2.0], " _-#") == "_ #"


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100, 1000])
def test_a_trend_keeps_the_means_of_neighbours_in_at_most_32_cells(count: int) -> None:
    values = [math.sin(0.01 * index) for index in range(count)]
    trend = Trend()
    for value in values:
        trend.add(value)
    width = 1
    while width * 32 < count:
        width *= 2
    expected = [values[start : start + width] for start in range(0, count, width)]
    assert trend.means() == pytest.approx([sum(cell) / len(cell) for cell in expected])
    assert len(trend.means()) <= 32


def test_durations_and_wrapping() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]
    assert wrap(["head", "aaaa", "bbbb", "cccc"], 12) == ["head  aaaa", "    bbbb", "    cccc"]


# --- TensorBoard ---------------------------------------------------------------------------------------------------


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    sink.write(1, "warmup", {"policy/nll": 2.5})
    sink.write(1, "train", {"rollout/reward": 0.25})
    sink.write(2, "train", {"rollout/reward": 0.5, "kept/negative": math.nan})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    read = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read == {"warmup/policy/nll": [(1, 2.5)], "train/rollout/reward": [(1, 0.25), (2, 0.5)]}


# --- curves --------------------------------------------------------------------------------------------------------


def test_curves_read_back_with_the_later_line_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for step, value in ((1, 1.0), (2, 7.0), (3, 7.0), (2, 2.0), (3, math.nan)):
        sink.write(step, "train", {"x/y": value})
    sink.write(1, "warmup", {"x/y": 9.0})
    sink.close()
    path.write_text(path.read_text() + '{"still being wri')
    curves = read_curves(path)
    assert [(series.stage, series.name) for series in curves.series] == [("warmup", "x/y"), ("train", "x/y")]
    series = curves.find("train", "x/y")
    assert series is not None
    assert series.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(series.values, [1.0, 2.0, math.nan])
    assert (series.first, series.last, series.lowest, series.highest) == (1.0, 2.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "holds no complete step yet"),
        ('{"stage": "train", "step": 1}\nnonsense\n', "line 2: not a line of metrics"),
        ('{"stage": "train"}\n', "line 1: not a line of metrics"),
        ('{"stage": "train", "step": 1, "x": "high"}\n', "line 1: not a line of metrics"),
        ("[1]\n", "line 1: not a line of metrics"),
    ],
)
def test_unreadable_metrics_are_data_errors(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_curves(path)


def series_of(values: list[float]) -> Series:
    return Series("train", "x", np.arange(len(values), dtype=np.int64), np.array(values))


def test_smoothing_averages_neighbours_and_leaves_nan_out() -> None:
    smooth = series_of([1.0, 3.0, math.nan, 5.0, 8.0]).smoothed(3)
    np.testing.assert_allclose(smooth.values, [2.0, 2.0, math.nan, 6.5, 6.5])
    with pytest.raises(ValueError, match="odd"):
        smooth.smoothed(2)


def test_thinning_keeps_spikes() -> None:
    values = [0.0] * 10_000
    values[4321], values[8765] = 50.0, -9.0
    thin = series_of(values).thinned(100)
    assert len(thin.steps) <= 100
    assert (thin.highest, thin.lowest) == (50.0, -9.0)
    assert thin.steps[thin.values == 50.0].tolist() == [4321]


def test_axis_places_and_ticks() -> None:
    linear, decades = Axis(0.0, 1.0, 100.0, 0.0), Axis(1e-6, 1e-2, 0.0, 80.0, log=True)
    assert [linear.place(value) for value in (0.0, 0.25, 1.0)] == [100.0, 75.0, 0.0]
    assert decades.place(1e-4) == pytest.approx(40.0)
    np.testing.assert_allclose(linear.ticks(), [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    np.testing.assert_allclose(decades.ticks(), [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
    np.testing.assert_allclose(Axis(1.3, 15.0, 0.0, 1.0, log=True).ticks(), [2.0, 5.0, 10.0])


# --- picture and page ----------------------------------------------------------------------------------------------


def test_picture_has_the_promised_size_and_every_row_is_drawn(tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl")
    write_png(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[:2] == (660, 1350)  # reward, kept, ratio and warm-up loss: two rows
    blue, orange, tint = ((37, 99, 201), (212, 105, 10), (244, 241, 232))
    colored = {
        color: np.abs(pixels[:, :, :3] - np.array(color) / 255).max(axis=2) < 0.02 for color in (blue, orange, tint)
    }
    assert colored[blue][:330, :450].sum() > 300  # the reward
    assert colored[orange][:330, :450].sum() > 100  # the held-out accuracy
    assert colored[tint][330:, :450].sum() > 50_000  # the warm-up's ground, in the second row
    assert colored[tint][:330].sum() < 10  # but for a stray pixel of a blended edge


class Page(HTMLParser):
    """Collects the tags, the text and the chart data of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.charts: list[dict[str, list[dict[str, list[object]]]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.charts += [json.loads(value or "") for name, value in attrs if name == "data-chart"]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_is_self_contained_and_holds_every_series(tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl")
    evil = "<script>alert('x')</script>"
    samples = [Shown("1+1=", "2", 1.0), Shown(evil, "&lt;", None)]
    write_html(tmp_path / "metrics.jsonl", tmp_path / "r.html", "Run <1> $5", "steps: 60\npath: a<b\n", samples)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"https?://|@import|url\(", text)
    assert evil not in text
    assert page.tags.count("script") == 1
    assert {evil, "&lt;", "steps: 60\npath: a<b\n", "Run <1> $5"} <= set(page.text)
    curves = read_curves(tmp_path / "metrics.jsonl")
    assert {series.name for series in curves.series} <= set(page.text)  # the tables
    assert page.tags.count("svg") == len(page.charts) == 5
    lines = {str(line["label"]): line for chart in page.charts for line in chart["lines"]}
    assert set(lines) == {
        "reward, sampled",
        "held-out accuracy",
        "advantage < 0",
        "maximum",
        "odd/one",
        "negative log-likelihood",
    }
    assert lines["held-out accuracy"]["steps"] == [0, 20, 40, 60]
    assert lines["held-out accuracy"]["values"] == ["0.25", "0.75", "0.75", "0.75"]
    assert lines["negative log-likelihood"]["values"][:3] == ["2", "1", "0.6667"]
    assert set(lines["advantage < 0"]["values"]) <= {"none"}


def test_page_draws_values_where_they_belong(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl")
    for step, reward in ((1, 0.0), (2, math.nan), (3, 1.0), (5, 0.5)):
        sink.write(step, "train", {"rollout/reward": reward})
    sink.close()
    write_html(tmp_path / "metrics.jsonl", tmp_path / "r.html", "run", "")
    # The plot spans x 66 to 426 for steps 1 to 5, and y 196 to 12 for rewards 0 to 1; NaN lifts the pen.
    assert 'd="M66.0 196.0M246.0 12.0L426.0 104.0"' in (tmp_path / "r.html").read_text()


def test_every_line_of_a_panel_has_a_colour() -> None:
    panels = (*WARMUP_PANELS, *MAIN_PANELS, *MORE_PANELS, *OTHER_PANELS)
    assert max(len(panel.lines) for panel in panels) <= len(COLORS)
