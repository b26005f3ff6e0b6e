"""Which tokens may still move: the mask form of a cell of the grid {divergence x estimator}."""

import math
from dataclasses import dataclass

import torch

from gppo_megatron.objective.divergences import Generator, generator_of
from gppo_megatron.objective.estimators import ESTIMATORS
from gppo_megatron.objective.presets import Cell
from gppo_megatron.objective.selected import at_least_float32


@dataclass(frozen=True, eq=False)
class Decision:
    """keep_T: bool, tokens whose gradient passes; never one that is not finite.

    finite_T: bool, tokens whose two log-probs, advantage and divergence are numbers (the divergence may be +inf).
    divergence_T: the cell's estimate; anything at all where finite_T is False.
    """

    keep_T: torch.Tensor
    finite_T: torch.Tensor
    divergence_T: torch.Tensor


@dataclass(frozen=True)
class TrustRegion:
    """A token is masked iff its update moves outward and the divergence exceeds that side's threshold.

    Outward: A > 0 with r > 1, or A < 0 with r < 1. A divergence equal to the threshold is kept.
    """

    cell: Cell

    @property
    def generator(self) -> Generator:
        return generator_of(self.cell.divergence, self.cell.alpha)

    @torch.no_grad()
    def decide(
        self,
        log_pi_T: torch.Tensor,
        log_mu_T: torch.Tensor,
        advantages_T: torch.Tensor,
        divergence_T: torch.Tensor | None = None,
    ) -> Decision:
        """Decide in float32 (float64 where the log-probs are float64); no gradient passes through a decision.

        divergence_T: the head's, of a cell `from_head`; ValueError where it is missing, and no other cell reads it.
        """
        log_pi_T, log_mu_T = at_least_float32(log_pi_T), at_least_float32(log_mu_T)
        divergence_T = self._estimate(log_pi_T, log_mu_T, divergence_T)
        up_T = (advantages_T > 0) & (log_pi_T > log_mu_T)
        down_T = (advantages_T < 0) & (log_pi_T < log_mu_T)
        outside_T = (up_T & (divergence_T > self.cell.delta_high)) | (down_T & (divergence_T > self.cell.delta_low))
        if self.cell.ratio_guard is not None:
            low, high = self.cell.ratio_guard
            log_ratio_T = log_pi_T - log_mu_T
            outside_T |= (up_T & (log_ratio_T > math.log(high))) | (down_T & (log_ratio_T < math.log(low)))
        finite_T = log_pi_T.isfinite() & log_mu_T.isfinite() & advantages_T.isfinite() & ~divergence_T.isnan()
        return Decision(finite_T & ~outside_T, finite_T, divergence_T)

    def _estimate(
        self, log_pi_T: torch.Tensor, log_mu_T: torch.Tensor, divergence_T: torch.Tensor | None
    ) -> torch.Tensor:
        if not self.cell.from_head:
            return ESTIMATORS[self.cell.estimator](self.generator, log_pi_T, log_mu_T)
        if divergence_T is None:
            raise ValueError(f"the estimator {self.cell.estimator!r} needs a divergence from the LM head")
        return at_least_float32(divergence_T)
