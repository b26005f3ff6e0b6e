"""Published methods as cells of the grid {divergence x estimator}; imports no torch.

Thresholds and their sources are listed in docs/objective.md. `gppo` is this project's own choice of thresholds:
KL(mu || pi) x atomic at 0.025 on both sides, and so are `gppo_topk` and `gppo_exact`, whose 0.05 is that of
`dppo_kl`; the paper's thresholds are not known.
"""

from dataclasses import dataclass
from math import cosh, inf
from typing import Literal

Advantage = Literal["mean", "mean_std", "leave_one_out"]
Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]

DIVERGENCES = ("tv", "kl_fwd", "kl_rev", "js", "hellinger2", "chi2_pearson", "chi2_neyman", "alpha")
TOKEN_ESTIMATORS = ("mc", "atomic", "binary")
"""Worked out of the sampled token's two log-probabilities."""

HEAD_ESTIMATORS = ("topk", "exact")
"""Worked out by the LM head, of the distribution that sampled: its likeliest tokens, or all of it."""

ESTIMATORS = (*TOKEN_ESTIMATORS, *HEAD_ESTIMATORS)

Surrogate = Literal["mask", "penalty", "sequence_mask", "geometric_mean"]
"""How a cell acts: it masks tokens; its divergence is penalised; it masks whole sequences by their ratio (GSPO); it
masks tokens and weighs those left with their sequence's geometric mean (GMPO)."""


@dataclass(frozen=True)
class Cell:
    """A trust region: mask a token iff its update moves outward and the estimated divergence exceeds the side's delta.

    delta_low bounds A < 0 with ratio below 1, delta_high bounds A > 0 with ratio above 1; inf bounds nothing.
    alpha: the parameter of the alpha family, None elsewhere.
    ratio_guard: (low, high), an outer ratio interval that also masks; None for the pure cell.
    """

    divergence: str
    estimator: str
    delta_low: float
    delta_high: float
    alpha: float | None = None
    ratio_guard: tuple[float, float] | None = None

    @property
    def from_head(self) -> bool:
        """Whether the divergence must come with the token streams."""
        return self.estimator in HEAD_ESTIMATORS

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
    """A method: its trust region, its advantages, its aggregation, how the region acts, its cap of the weight."""

    cell: Cell
    advantage: Advantage = "mean"
    aggregation: Aggregation = "token_mean"
    surrogate: Surrogate = "mask"
    ratio_cap: float | None = None


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
    "gspo": Preset(Cell("tv", "mc", 1.5e-4, 2e-4), "mean_std", "sequence_mean", "sequence_mask"),
    "gmpo": Preset(
        Cell("chi2_neyman", "mc", cosh(0.4) - 1, cosh(0.4) - 1), "mean_std", "sequence_mean", "geometric_mean"
    ),
    "cispo": Preset(Cell("tv", "mc", inf, inf), "mean_std", "token_mean", ratio_cap=5.0),
    "spo": Preset(Cell("chi2_pearson", "mc", 0.2, 0.2), "mean_std", "token_mean", "penalty"),
    "drpo": Preset(Cell("chi2_pearson", "atomic", 12.5, 12.5), "mean_std", "token_mean", "penalty"),
    "gppo": Preset(Cell("kl_fwd", "atomic", 0.025, 0.025), "mean", "token_mean"),
    "gppo_topk": Preset(Cell("kl_fwd", "topk", 0.05, 0.05), "mean", "token_mean"),
    "gppo_exact": Preset(Cell("kl_fwd", "exact", 0.05, 0.05), "mean", "token_mean"),
}
