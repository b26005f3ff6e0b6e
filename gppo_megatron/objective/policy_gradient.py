"""Per-token losses. `TokenStreams` in, `TokenLoss` out; nothing here sums over tokens (see `reduce`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from gppo_megatron.metrics import Max, Mean, Metric, Sum
from gppo_megatron.objective.trust_region import Decision, TrustRegion, at_least_float32

LOG_RATIO_LIMIT = 20.0
"""Bound of |log r| where a ratio becomes a weight: e^20 is far above any cap that is in use."""


@dataclass(frozen=True, eq=False)
class TokenStreams:
    """What an objective may look at, one entry a predicted token; float32 unless said otherwise.

    logprobs_T: log pi of the token under the current policy, with gradient.
    entropy_T: the current policy's entropy (nats), with gradient.
    anchor_logprobs_T: log mu of the token under the trust region's centre.
    sampler_logprobs_T: its log-probability when it was sampled (equal to the anchor by default).
    advantages_T: the token's advantage.
    age_T: int64, optimizer steps between sampling the token and now; only read within the mask.
    mask_T: bool, tokens that carry loss; whatever the other streams hold elsewhere (NaN included) must not matter.
    """

    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor
    anchor_logprobs_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    advantages_T: torch.Tensor
    age_T: torch.Tensor
    mask_T: torch.Tensor


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """loss_T: float32 [T], exactly 0 (and with zero gradient) outside the mask. metrics: 0-dimensional tensors."""

    loss_T: torch.Tensor
    metrics: Mapping[str, Metric[torch.Tensor]]


class Objective(Protocol):
    """A loss per token."""

    def __call__(self, streams: TokenStreams) -> TokenLoss: ...


@dataclass(frozen=True)
class PolicyGradient:
    """loss = -A w log pi on the tokens the trust region keeps, with w = pi / mu a constant: the gradient of -A pi / mu.

    ratio_cap: w is at most this, on every token; the gradient stays, with the truncated weight.
    dual_clip: where A < 0 and pi / mu exceeds this, the token has no gradient: dual-clip PPO, arXiv 1912.09729.
    None leaves the cell exact. Both are at least 1, or ValueError.

    A loss token with a non-finite log-prob, anchor or advantage gets no loss; `policy/non_finite` counts them. It is
    one that `kept/*` counts as not kept; every other metric leaves it out.
    """

    region: TrustRegion
    ratio_cap: float | None = None
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("ratio_cap", self.ratio_cap), ("dual_clip", self.dual_clip)):
            if limit is not None and not limit >= 1:
                raise ValueError(f"{name} must be at least 1, got {limit}")

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        advantages_T = streams.advantages_T
        decision = self.region.decide(streams.logprobs_T, streams.anchor_logprobs_T, advantages_T)
        with torch.no_grad():
            log_ratio_T = at_least_float32(streams.logprobs_T) - at_least_float32(streams.anchor_logprobs_T)
            ratio_T = torch.exp(log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
            cap, dual = _or_infinity(self.ratio_cap), _or_infinity(self.dual_clip)
            dropped_T = (advantages_T < 0) & (ratio_T > dual)
            trained_T = streams.mask_T & decision.keep_T & ~dropped_T
            # `where`, because 0 * NaN and 0 * -inf are NaN.
            coefficient_T = torch.where(trained_T, advantages_T * ratio_T.clamp_max(cap), 0.0)
            metrics = self._metrics(streams, decision, log_ratio_T, ratio_T, (ratio_T > cap) | dropped_T)
        return TokenLoss(-coefficient_T * _only(trained_T, streams.logprobs_T), metrics)

    def _metrics(
        self,
        streams: TokenStreams,
        decision: Decision,
        log_ratio_T: torch.Tensor,
        ratio_T: torch.Tensor,
        capped_T: torch.Tensor,
    ) -> dict[str, Metric[torch.Tensor]]:
        """`kept/*` report the trust region's decision alone, `ratio/capped` what ratio_cap and dual_clip change."""
        valid_T = streams.mask_T & decision.finite_T
        kept_T = decision.keep_T.float()
        gap_T = (at_least_float32(streams.logprobs_T) - streams.sampler_logprobs_T).abs()
        return {
            "kept/positive": _mean(kept_T, streams.mask_T & (streams.advantages_T > 0)),
            "kept/negative": _mean(kept_T, streams.mask_T & (streams.advantages_T < 0)),
            "divergence/mean": _mean(decision.divergence_T, valid_T),
            "divergence/mc": _mean(self.region.generator.mc(log_ratio_T), valid_T),
            "ratio/mean": _mean(ratio_T, valid_T),
            "ratio/max": _largest(ratio_T, valid_T),
            "ratio/capped": _mean(capped_T.float(), valid_T),
            "policy/entropy": _mean(streams.entropy_T, valid_T),
            # Only before the policy has moved does the gap show how sampler and trainer disagree on the same weights.
            "policy/sampler_gap": _mean(gap_T, valid_T & (streams.age_T == 0)),
            "policy/sampler_gap_max": _largest(gap_T, valid_T & (streams.age_T == 0)),
            "policy/age": _mean(streams.age_T.float(), valid_T),
            "policy/log_ratio": _mean(log_ratio_T, valid_T),
            "policy/non_finite": Sum((streams.mask_T & ~decision.finite_T).sum().float()),
        }


@dataclass(frozen=True)
class MaximumLikelihood:
    """loss = -log pi on the mask, whatever the advantages: supervised training on given answers.

    A token whose log-prob is not finite gets no loss and is counted in `policy/non_finite`.
    """

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        valid_T = streams.mask_T & streams.logprobs_T.isfinite()
        loss_T = -_only(valid_T, streams.logprobs_T)
        metrics: dict[str, Metric[torch.Tensor]] = {
            "policy/entropy": _mean(streams.entropy_T, valid_T),
            "policy/nll": _mean(loss_T, valid_T),
            "policy/non_finite": Sum((streams.mask_T & ~valid_T).sum().float()),
        }
        return TokenLoss(loss_T, metrics)


def _or_infinity(limit: float | None) -> float:
    return torch.inf if limit is None else limit


def _only(selected_T: torch.Tensor, values_T: torch.Tensor) -> torch.Tensor:
    """At least float32; 0 with zero gradient where not selected."""
    return torch.where(selected_T, at_least_float32(values_T), 0.0)


def _mean(values_T: torch.Tensor, selected_T: torch.Tensor) -> Mean[torch.Tensor]:
    """Over the selected finite values; without gradient."""
    values_T = values_T.detach()
    selected_T = selected_T & values_T.isfinite()
    return Mean(_only(selected_T, values_T).sum(), selected_T.sum().float())


def _largest(values_T: torch.Tensor, selected_T: torch.Tensor) -> Max[torch.Tensor]:
    """Of the selected finite values, which are not negative; 0 where there is none."""
    values_T = _only(selected_T & values_T.isfinite(), values_T.detach())
    return Max(torch.cat([values_T, values_T.new_zeros(1)]).max())
