"""Published methods as cells of the grid {divergence x estimator}; imports no torch.

Thresholds and their sources are listed in docs/objective.md. `gppo` is this project's own choice of thresholds:
KL(mu || pi) x atomic at 0.025 on both sides; the paper's thresholds are not known.
"""

from dataclasses import dataclass
from typing import Literal

Advantage = Literal["mean", "mean_std", "leave_one_out"]
Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]

DIVERGENCES = ("tv", "kl_fwd", "kl_rev", "js", "hellinger2", "chi2_pearson", "chi2_neyman", "alpha")
ESTIMATORS = ("mc", "atomic", "binary")


@dataclass(frozen=True)
class Cell:
    """A trust region: mask a token iff its update moves outward and the estimated divergence exceeds the side's delta.

    delta_low bounds A < 0 with ratio below 1, delta_high bounds A > 0 with ratio above 1.
    alpha: the parameter of the alpha family, None elsewhere.
    ratio_guard: (low, high), an outer ratio interval that also masks; None for the pure cell.
    """

    divergence: str
    estimator: str
    delta_low: float
    delta_high: float
    alpha: float | None = None
    ratio_guard: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence must be one of {', '.join(DIVERGENCES)}; got {self.divergence!r}")
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}; got {self.estimator!r}")
        if not (self.delta_low > 0 and self.delta_high > 0):
            raise ValueError(f"thresholds must be > 0; got {self.delta_low}, {self.delta_high}")
        if (self.divergence == "alpha") != (self.alpha is not None):
            raise ValueError("alpha must be set for the divergence 'alpha', and only there")
        if self.ratio_guard is not None and not 0 < self.ratio_guard[0] < 1 < self.ratio_guard[1]:
            raise ValueError(f"ratio_guard must be [low, high] with 0 < low < 1 < high; got {list(self.ratio_guard)}")


@dataclass(frozen=True)
class Preset:
    """A method: its trust region, its advantages and its aggregation."""

    cell: Cell
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"


PRESETS: dict[str, Preset] = {
    "ppo": Preset(Cell("tv", "mc", 0.1, 0.1)),
    "grpo": Preset(Cell("tv", "mc", 0.1, 0.1), "mean_std", "sequence_mean"),
    "dr_grpo": Preset(Cell("tv", "mc", 0.1, 0.1), "mean", "constant_length"),
    "dapo": Preset(Cell("tv", "mc", 0.1, 0.14), "mean_std", "token_mean"),
    "dppo_tv": Preset(Cell("tv", "binary", 0.15, 0.15), "mean", "constant_length"),
    "dppo_kl": Preset(Cell("kl_fwd", "binary", 0.05, 0.05), "mean", "constant_length"),
    "ripo": Preset(Cell("chi2_pearson", "atomic", 0.025, 0.025), "mean_std", "token_mean"),
    "ripo_guarded": Preset(
        Cell("chi2_pearson", "atomic", 0.025, 0.025, ratio_guard=(0.5, 10.0)), "mean_std", "token_mean"
    ),
    "gppo": Preset(Cell("kl_fwd", "atomic", 0.025, 0.025), "mean", "token_mean"),
}
