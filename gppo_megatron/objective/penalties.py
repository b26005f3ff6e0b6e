"""Soft trust regions: a penalty on the estimated divergence in place of a mask."""

from dataclasses import dataclass

import torch

from gppo_megatron.objective.estimators import ESTIMATORS
from gppo_megatron.objective.policy_gradient import (
    TokenLoss,
    TokenStreams,
    bounded_ratio,
    policy_metrics,
    ratio_metrics,
)
from gppo_megatron.objective.presets import Cell
from gppo_megatron.objective.selected import at_least_float32, fraction_of, mean_of, only
from gppo_megatron.objective.trust_region import TrustRegion


@dataclass(frozen=True)
class PenalizedGradient:
    """loss = -c log pi on every token, c the constant slope of r A - |A| D / delta with respect to log pi.

    c = r A - |A| / delta dD / d log pi: it crosses 0 on a ratio that moved outward far enough, and reverses beyond.
    chi2_pearson x mc is SPO (arXiv 2401.16025, its eps is delta), chi2_pearson x atomic is DRPO (arXiv 2606.09821):
    c = r A (1 - sign(A (r - 1)) |pi - mu| / delta). delta_low counts where r < 1, delta_high elsewhere.

    A loss token with a non-finite log-prob, anchor or advantage gets no loss; `policy/non_finite` counts them.
    Raises ValueError for other estimators than mc and atomic, and for a ratio guard, which masks.
    """

    cell: Cell

    def __post_init__(self) -> None:
        if self.cell.estimator not in {"mc", "atomic"}:
            raise ValueError(f"a penalty needs the estimator mc or atomic, not {self.cell.estimator!r}")
        if self.cell.ratio_guard is not None:
            raise ValueError("a penalty masks nothing, so it has no ratio_guard")

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        log_pi_T, log_mu_T = (
            at_least_float32(logs_T.detach()) for logs_T in (streams.logprobs_T, streams.anchor_logprobs_T)
        )
        finite_T = log_pi_T.isfinite() & log_mu_T.isfinite() & streams.advantages_T.isfinite()
        valid_T = streams.mask_T & finite_T
        divergence_T, slope_T = self._divergence(only(valid_T, log_pi_T), only(valid_T, log_mu_T))
        with torch.no_grad():
            log_ratio_T = log_pi_T - log_mu_T
            high_T = torch.full_like(log_ratio_T, self.cell.delta_high)
            delta_T = torch.where(log_ratio_T < 0, self.cell.delta_low, high_T)
            slope_T = streams.advantages_T * bounded_ratio(log_ratio_T) - streams.advantages_T.abs() * slope_T / delta_T
            coefficient_T = torch.where(valid_T, slope_T, 0.0)
            reversed_T = coefficient_T * streams.advantages_T < 0
            metrics = {
                "divergence/mean": mean_of(divergence_T, valid_T),
                "divergence/mc": mean_of(TrustRegion(self.cell).generator.mc(log_ratio_T), valid_T),
                "penalty/reversed": fraction_of(reversed_T, valid_T),
                **ratio_metrics(streams, log_ratio_T, finite_T),
                **policy_metrics(streams, finite_T),
            }
        return TokenLoss(-coefficient_T * only(valid_T, streams.logprobs_T), metrics, ~reversed_T)

    def _divergence(self, log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """D and its derivative with respect to log pi, for finite log-probs."""
        with torch.enable_grad():
            leaf_T = log_pi_T.requires_grad_()
            divergence_T = ESTIMATORS[self.cell.estimator](TrustRegion(self.cell).generator, leaf_T, log_mu_T)
            (slope_T,) = torch.autograd.grad(divergence_T.sum(), leaf_T)
        return divergence_T.detach(), slope_T
