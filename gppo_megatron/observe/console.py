"""The line a human watches while a run works."""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np

LINE_STEPS = 10
LINE_SECONDS = 10.0
MAX_WIDTH = 120
CURVE_CELLS = 16

PARTS = (
    ("evaluation/accuracy", "held-out {:.2f}"),
    ("policy/nll", "nll {:.3f}"),
    ("policy/entropy", "entropy {:.3f}"),
    ("kept/positive", "kept+ {:.3f}"),
    ("kept/negative", "kept- {:.3f}"),
    ("divergence/mean", "divergence {:.1e}"),
    ("ratio/max", "ratio max {:.3g}"),
    ("policy/sampler_gap", "gap {:.1e}"),
    ("speed/tokens_per_second", "{:,.0f} tok/s"),
)
"""What is shown of a step, the most telling first: a narrow terminal loses the last ones."""

ALARMS = (
    ("policy/non_finite", "NON-FINITE {:g}"),
    ("optimizer/skipped", "SKIPPED {:g}"),
    ("rollout/no_score", "no score {:g}"),
    ("evaluation/no_score", "held-out no score {:g}"),
)
"""Shown only when above zero."""


class Trend:
    """A run's values at a fixed cost: their means over neighbours, at most 32, all but the last over as many."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._each = 1  # values a full cell holds
        self._last = 0  # values the last cell holds

    def add(self, value: float) -> None:
        if not self._sums or self._last == self._each:
            if len(self._sums) == 2 * CURVE_CELLS:
                self._sums = [a + b for a, b in zip(self._sums[::2], self._sums[1::2], strict=True)]
                self._each *= 2
            self._sums.append(0.0)
            self._last = 0
        self._sums[-1] += value
        self._last += 1

    def means(self) -> list[float]:
        """Oldest first."""
        return [total / self._each for total in self._sums[:-1]] + [total / self._last for total in self._sums[-1:]]


@dataclass
class _Progress:
    """Where a stage began, when its last lasting line was left, and its rewards so far."""

    stage: str
    first_step: int
    first_time: float
    line_time: float = -math.inf
    rewards: Trend = field(default_factory=Trend)


class Console:
    """Shows progress on `stream`; total_steps: stage -> how many steps it will have.

    On a terminal the current step's line is rewritten in place, and a lasting record is left every 10 steps, at each
    evaluation and at a stage's end. Elsewhere only those records are written, and one where 10 seconds had none.
    A record wraps at `width` columns (default: the terminal's, at most 120); the line in place is cut to it.
    clock: seconds, from any origin.
    """

    def __init__(
        self,
        stream: TextIO,
        total_steps: Mapping[str, int],
        *,
        width: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._width = width
        self._clock = clock
        self._progress = _Progress("", 0, 0.0)
        self._open_line = False

    def write(self, step: int, stage: str, values: Mapping[str, float]) -> None:
        now = self._clock()
        if stage != self._progress.stage:
            self.close()
            self._progress = _Progress(stage, step, now)
        if "rollout/reward" in values:
            self._progress.rewards.add(values["rollout/reward"])
        parts = self._parts(step, values, now)
        if self._lasts(step, values, now):
            self._clear()
            self._stream.write("\n".join(wrap(parts, self._columns())) + "\n")
            self._progress.line_time = now
        elif self._stream.isatty():
            self._clear()
            self._stream.write(wrap(parts, self._columns() - 1)[0])
            self._open_line = True
        self._stream.flush()

    def close(self) -> None:
        """Leave the cursor on a fresh line; the stream stays open."""
        if self._open_line:
            self._stream.write("\n")
            self._stream.flush()
            self._open_line = False

    def _clear(self) -> None:
        if self._open_line:
            self._stream.write("\r\x1b[2K")
            self._open_line = False

    def _columns(self) -> int:
        return self._width or min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns)

    def _lasts(self, step: int, values: Mapping[str, float], now: float) -> bool:
        """Whether this step leaves a record that stays."""
        overdue = now - self._progress.line_time >= LINE_SECONDS and not self._stream.isatty()
        ends = step == self._total_steps.get(self._progress.stage)
        return step % LINE_STEPS == 0 or "evaluation/accuracy" in values or ends or overdue

    def _parts(self, step: int, values: Mapping[str, float], now: float) -> list[str]:
        """The pieces of a line, the step first; what could not be measured is left out."""
        values = {name: value for name, value in values.items() if not math.isnan(value)}
        total = self._total_steps.get(self._progress.stage)
        digits = len(str(total or step))
        parts = [f"{self._progress.stage} {step:>{digits}}" + (f"/{total}" if total else "")]
        if "rollout/reward" in values:
            ramp = " ▁▂▃▄▅▆▇█" if "utf" in (self._stream.encoding or "").lower() else " _.-=+*%#"
            parts.append(f"reward {values['rollout/reward']:.3f} |{curve(self._progress.rewards.means(), ramp)}|")
        parts += [text.format(values[name]) for name, text in ALARMS if values.get(name, 0.0) > 0]
        seconds = self._seconds_left(step, values, now)
        if seconds is not None:
            parts.append(f"left {duration(seconds)}")
        parts += [text.format(values[name]) for name, text in PARTS if name in values]
        phases = sorted(name for name in values if name.startswith("time/") and name != "time/step")
        return parts + [f"{name.removeprefix('time/')} {values[name]:.2f}s" for name in phases]

    def _seconds_left(self, step: int, values: Mapping[str, float], now: float) -> float | None:
        """Steps left at the stage's pace so far; None where either is unknown."""
        steps_done = step - self._progress.first_step
        pace = (now - self._progress.first_time) / steps_done if steps_done > 0 else values.get("time/step")
        total = self._total_steps.get(self._progress.stage)
        return None if pace is None or total is None else pace * max(0, total - step)


def wrap(parts: Sequence[str], width: int) -> list[str]:
    """Lines of at most `width` columns, two spaces between parts; later lines are indented."""
    indent = "  "
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) > width and lines[-1] != indent:
            lines.append(indent)
        lines[-1] += "  " + part
    return [line[:width] for line in lines]


def curve(values: Sequence[float], ramp: str) -> str:
    """At most 16 characters for a whole run's values in [0, 1]: ramp[1] is 0, ramp[-1] is 1, ramp[0] no number.

    >>> curve([0.0, 0.5, 1.0], " _-#")
    '_-#'
    """
    cells = [float(np.mean(part)) for part in np.array_split(np.asarray(values), min(len(values), CURVE_CELLS))]
    top = len(ramp) - 2
    levels = [1 + round(top * min(1.0, max(0.0, cell))) if math.isfinite(cell) else 0 for cell in cells]
    return "".join(ramp[level] for level in levels)


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from one hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
