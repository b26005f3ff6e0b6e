"""Weights for what the sampler and the trainer disagree about, and rejection of whole sequences.

k = anchor / sampler: the trainer's own probability of a sampled token at the start of the step over the one it was
sampled with. It differs from 1 only where the anchor is recomputed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from gppo_megatron.metrics import Metric, Sum
from gppo_megatron.objective.policy_gradient import Objective, TokenLoss, TokenStreams, bounded_ratio
from gppo_megatron.objective.selected import at_least_float32, fraction_of, mean_of
from gppo_megatron.objective.sequence import Sequences

Level = Literal["token", "sequence"]
Statistic = Literal["mean", "largest"]


@dataclass(frozen=True, eq=False)
class Correction:
    """weight_T: what a token's loss is multiplied by; NaN where a log-prob that it needs is not finite."""

    weight_T: torch.Tensor
    metrics: Mapping[str, Metric[torch.Tensor]]


class Corrector(Protocol):
    """A weight per token, without gradient."""

    def __call__(self, streams: TokenStreams) -> Correction: ...


@dataclass(frozen=True)
class Corrected:
    """`objective` with its loss times the product of the corrections' weights.

    A token without a weight gets no loss; `correction/non_finite` counts those with loss otherwise. What a correction
    drops stays in the denominators: the global counts were fixed when the batch was packed.
    """

    objective: Objective
    correctors: tuple[Corrector, ...]

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        loss = self.objective(streams)
        with torch.no_grad():
            corrections = [corrector(streams) for corrector in self.correctors]
            weight_T = torch.ones_like(loss.loss_T)
            for correction in corrections:
                weight_T = weight_T * correction.weight_T
            undefined_T = streams.mask_T & weight_T.isnan()
            # Outside the mask the weight may be anything, and 0 * NaN is NaN.
            weight_T = torch.where(streams.mask_T & ~undefined_T, weight_T, 0.0)
        metrics = dict(loss.metrics) | {"correction/non_finite": Sum(undefined_T.sum().float())}
        for correction in corrections:
            metrics |= correction.metrics
        return replace(loss, loss_T=loss.loss_T * weight_T, metrics=metrics)


@dataclass(frozen=True)
class TruncatedSampling:
    """TIS: weight = min(k, cap). level: k of the token, or the product of k over its sequence's loss tokens."""

    level: Level
    cap: float

    def __call__(self, streams: TokenStreams) -> Correction:
        weight_T = mismatch(streams, self.level)
        metrics: dict[str, Metric[torch.Tensor]] = {
            "tis/weight": mean_of(weight_T.clamp_max(self.cap), streams.mask_T),
            "tis/truncated": fraction_of(weight_T > self.cap, streams.mask_T),
        }
        return Correction(weight_T.clamp_max(self.cap), metrics)


@dataclass(frozen=True)
class MaskedSampling:
    """MIS (IcePop, arXiv 2510.18855): weight = k where low <= k <= high, else 0; `level` as in TruncatedSampling."""

    level: Level
    low: float
    high: float

    def __call__(self, streams: TokenStreams) -> Correction:
        weight_T = mismatch(streams, self.level)
        outside_T = (weight_T < self.low) | (weight_T > self.high)
        metrics: dict[str, Metric[torch.Tensor]] = {
            "mis/weight": mean_of(torch.where(outside_T, 0.0, weight_T), streams.mask_T),
            "mis/masked": fraction_of(outside_T, streams.mask_T),
        }
        return Correction(torch.where(outside_T, 0.0, weight_T), metrics)


@dataclass(frozen=True)
class SequenceRejection:
    """Weight 0 on a whole sequence whose mean, or largest, k - 1 - log k exceeds `limit`, else 1.

    The mean over sampled tokens of k - 1 - log k estimates KL(sampler || anchor) without bias, and is never negative.
    """

    statistic: Statistic
    limit: float

    def __call__(self, streams: TokenStreams) -> Correction:
        log_k_T = _log_ratio(streams.anchor_logprobs_T, streams.sampler_logprobs_T)
        divergence_T = torch.expm1(log_k_T.clamp(-20.0, 20.0)) - log_k_T
        sequences = Sequences.of(streams)
        # `largest` would pass over a NaN, which `means` does not: 0 x the mean brings it back.
        mean_T = sequences.means(divergence_T)
        value_T = {"mean": mean_T, "largest": sequences.largest(divergence_T) + 0 * mean_T}[self.statistic]
        metrics: dict[str, Metric[torch.Tensor]] = {
            "reject/rejected": fraction_of(value_T > self.limit, streams.mask_T),
            "reject/divergence": mean_of(value_T, streams.mask_T),
        }
        return Correction(torch.where(value_T > self.limit, 0.0, 1.0 + 0 * value_T), metrics)


@dataclass(frozen=True)
class OffPolicyRejection:
    """OPSM (DeepSeek-V3.2): weight 0 on a sequence with A < 0 whose mean of log(mu / pi) exceeds `limit`, else 1.

    mu: the sampler. It compares the sampler with the policy as it is now, so it needs no recomputed anchor.
    """

    limit: float

    def __call__(self, streams: TokenStreams) -> Correction:
        mean_T = -Sequences.of(streams).means(_log_ratio(streams.logprobs_T, streams.sampler_logprobs_T))
        rejected_T = (streams.advantages_T < 0) & (mean_T > self.limit)
        metrics: dict[str, Metric[torch.Tensor]] = {"opsm/rejected": fraction_of(rejected_T, streams.mask_T)}
        return Correction(torch.where(rejected_T, 0.0, 1.0 + 0 * mean_T), metrics)


def mismatch(streams: TokenStreams, level: Level) -> torch.Tensor:
    """k of each token, or of its sequence: between e^-20 and e^20, NaN where a log-prob it needs is not finite."""
    log_k_T = _log_ratio(streams.anchor_logprobs_T, streams.sampler_logprobs_T)
    if level == "sequence":
        sequences = Sequences.of(streams)
        log_k_T = sequences.sums(log_k_T)[sequences.sequence_T]
    return bounded_ratio(log_k_T)


def _log_ratio(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """log(p / q); NaN where that is not finite."""
    log_ratio_T = at_least_float32(log_p_T.detach()) - at_least_float32(log_q_T)
    return torch.where(log_ratio_T.isfinite(), log_ratio_T, torch.nan)
