"""Which metrics share a chart, and how a chart is labelled."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gppo_megatron.observe.curves import Curves, Series


@dataclass(frozen=True)
class Line:
    """A metric inside a panel. sparse: measured now and then, drawn with markers and never smoothed."""

    metric: str
    label: str
    sparse: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart. unit: the label of its y axis. log: a logarithmic y axis where every value is above 0.

    limits: the y axis of a quantity that cannot leave them; None fits the data.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    log: bool = False
    limits: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class Chart:
    """A panel with its data: series[i] belongs to panel.lines[i]; lines without data are left out."""

    panel: Panel
    stage: str
    series: tuple[Series, ...]

    def __post_init__(self) -> None:
        if not self.series or len(self.series) != len(self.panel.lines):
            raise ValueError(f"{self.panel.title}: {len(self.panel.lines)} lines but {len(self.series)} series")

    @property
    def step_label(self) -> str:
        """The label of the x axis."""
        return "warm-up step" if self.stage == "warmup" else "training step"


WARMUP_PANELS = (
    Panel("Loss on reference answers", "nats per token", (Line("policy/nll", "negative log-likelihood"),)),
    Panel(
        "Accuracy after warm-up",
        "share right",
        (Line("evaluation/accuracy", "held-out accuracy", sparse=True),),
        limits=(0.0, 1.0),
    ),
)

MAIN_PANELS = (
    Panel(
        "Reward",
        "score",
        (Line("rollout/reward", "reward, sampled"), Line("evaluation/accuracy", "held-out accuracy", sparse=True)),
        limits=(0.0, 1.0),
    ),
    Panel("Entropy", "nats per token", (Line("policy/entropy", "entropy"),)),
    Panel(
        "Kept inside the trust region",
        "share of tokens",
        (Line("kept/positive", "advantage > 0"), Line("kept/negative", "advantage < 0")),
    ),
    Panel("Divergence from the sampling policy", "estimate per token", (Line("divergence/mean", "mean"),), log=True),
    Panel("Largest ratio", "pi / mu", (Line("ratio/max", "maximum"),), log=True),
    Panel(
        "Gap between sampler and trainer",
        "nats per token",
        (Line("policy/sampler_gap", "mean"), Line("policy/sampler_gap_max", "maximum")),
        log=True,
    ),
)

MORE_PANELS = (
    Panel("Response length", "tokens", (Line("rollout/length", "mean"),)),
    Panel(
        "Speed",
        "tokens per second",
        (Line("speed/tokens_per_second", "whole step"), Line("speed/sampled_tokens_per_second", "sampling alone")),
    ),
)

OTHER_PANELS = (
    Panel("Finished by an end token", "share of responses", (Line("rollout/finished", "finished"),)),
    Panel(
        "Groups of equal rewards", "share of groups", (Line("rollout/groups_without_signal", "groups without signal"),)
    ),
    Panel(
        "Answers without a score",
        "answers",
        (
            Line("rollout/no_score", "all"),
            Line("rollout/verdict_timeout", "timeout"),
            Line("rollout/verdict_crash", "crash"),
            Line("rollout/verdict_infra", "judge failed"),
        ),
    ),
    Panel(
        "Divergence by estimator",
        "mean per token",
        tuple(Line(f"estimate/{name}", name) for name in ("mc", "atomic", "binary")),
        log=True,
    ),
    Panel(
        "Largest divergence by estimator",
        "estimate",
        tuple(Line(f"estimate/{name}_max", name) for name in ("mc", "atomic", "binary")),
        log=True,
    ),
    *(
        Panel(
            f"Divergence above {threshold}",
            "share of tokens",
            tuple(Line(f"estimate/{name}_above_{threshold}", name) for name in ("mc", "atomic", "binary")),
        )
        for threshold in ("0.01", "0.1")
    ),
    *(
        Panel(
            f"Masked, {sign} advantage",
            "share of tokens",
            tuple(
                Line(f"masked/{sign}_mu_{low}_to_{high}", f"mu {low} to {high}")
                for low, high in pairwise(("0", "0.01", "0.1", "0.5", "0.9", "1"))
            ),
        )
        for sign in ("positive", "negative")
    ),
    Panel(
        "Improvement bound",
        "advantage per sequence",
        (Line("bound/surrogate", "surrogate"), Line("bound/remainder", "remainder")),
    ),
    Panel("KL to the reference", "nats per token", (Line("kl/k1", "k1"), Line("kl/k3", "k3"))),
    Panel("Gradient norm", "before clipping", (Line("optimizer/grad_norm", "norm"),)),
    Panel("Learning rate", "per step", (Line("optimizer/lr", "learning rate"),)),
    Panel(
        "Time per phase",
        "seconds",
        (
            Line("time/rollout", "rollout"),
            Line("time/update", "update"),
            Line("time/publish", "publish"),
            Line("time/step", "whole step"),
        ),
    ),
)


def charts_of(curves: Curves, stage: str, panels: Sequence[Panel]) -> list[Chart]:
    """The panels that have data in `stage`, in their order."""
    charts = []
    for panel in panels:
        found = [(line, curves.find(stage, line.metric)) for line in panel.lines]
        present = [(line, series) for line, series in found if series is not None]
        if present:
            lines = tuple(line for line, _ in present)
            shown = Panel(panel.title, panel.unit, lines, panel.log, panel.limits)
            charts.append(Chart(shown, stage, tuple(series for _, series in present)))
    return charts


def remaining_charts(curves: Curves, stage: str, drawn: Sequence[Chart]) -> list[Chart]:
    """One chart each for the stage's metrics that no chart of `drawn` shows."""
    shown = {series.name for chart in drawn for series in chart.series}
    return [
        Chart(Panel(series.name, "value", (Line(series.name, series.name),)), stage, (series,))
        for series in curves.stage(stage)
        if series.name not in shown
    ]


def smoothing_window(points: int) -> int:
    """How many neighbours a curve of that many points is averaged over: about a twentieth, odd; 1 for short ones."""
    return 1 if points < 20 else 2 * (points // 40) + 3
