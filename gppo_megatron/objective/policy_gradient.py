"""Per-token losses. `TokenStreams` in, `TokenLoss` out; nothing here sums over tokens (see `reduce`)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch

from gppo_megatron.metrics import Metric, Sum
from gppo_megatron.objective.selected import at_least_float32, fraction_of, largest_of, mean_of, only
from gppo_megatron.objective.trust_region import Decision, TrustRegion

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
    divergence_T: the LM head's estimate of the divergence, without gradient; None where none was asked for.
    exact_T: the divergence itself, without gradient, NaN where it was not worked out; None where none was asked for.
    squares_T: sum over the vocabulary of pi^2, without gradient; None where it is not known.
    mask_T: bool, tokens that carry loss; whatever the other streams hold elsewhere (NaN included) must not matter.
    lengths: tokens of each sequence, in order; only objectives that look at whole sequences need them.
    reference_logprobs_T: its log-probability under a frozen reference policy; None where the run has none.
    """

    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor
    anchor_logprobs_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    advantages_T: torch.Tensor
    age_T: torch.Tensor
    mask_T: torch.Tensor
    lengths: tuple[int, ...] = ()
    reference_logprobs_T: torch.Tensor | None = None
    divergence_T: torch.Tensor | None = None
    exact_T: torch.Tensor | None = None
    squares_T: torch.Tensor | None = None

    def detached(self) -> "TokenStreams":
        """The same without gradient."""
        return replace(self, logprobs_T=self.logprobs_T.detach(), entropy_T=self.entropy_T.detach())


def joined(parts: Sequence[TokenStreams]) -> TokenStreams:
    """The streams of several micro-batches one after the other; all have the same ones."""
    if len(parts) == 1:
        return parts[0]
    streams = [[getattr(part, field.name) for part in parts] for field in fields(TokenStreams)]
    return TokenStreams(*map(_joined, streams))


def _joined(values: list[Any]) -> Any:
    match values[0]:
        case torch.Tensor():
            return torch.cat(values)
        case tuple():
            return tuple(itertools.chain.from_iterable(values))
        case _:
            return None


class Seen(Protocol):
    """What one micro-batch keeps for a look at all tokens of the step."""

    def measure(self, step: Sequence[Any]) -> Mapping[str, Metric[torch.Tensor]]:
        """Of all micro-batches of the step, this one among them, seen by the same objective."""
        ...


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """loss_T: float32 [T], exactly 0 (and with zero gradient) outside the mask. metrics: 0-dimensional tensors.

    kept_T: bool [T], tokens whose update a trust region lets pass; None where the objective has none.
    seen: what is to be measured once all micro-batches of the step have run; None where that is nothing.
    """

    loss_T: torch.Tensor
    metrics: Mapping[str, Metric[torch.Tensor]]
    kept_T: torch.Tensor | None = None
    seen: "Seen | None" = None


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
        decision = self.region.decide(streams.logprobs_T, streams.anchor_logprobs_T, advantages_T, streams.divergence_T)
        with torch.no_grad():
            log_ratio_T = at_least_float32(streams.logprobs_T) - at_least_float32(streams.anchor_logprobs_T)
            ratio_T = bounded_ratio(log_ratio_T)
            cap, dual = _or_infinity(self.ratio_cap), _or_infinity(self.dual_clip)
            dropped_T = (advantages_T < 0) & (ratio_T > dual)
            trained_T = streams.mask_T & decision.keep_T & ~dropped_T
            # `where`, because 0 * NaN and 0 * -inf are NaN.
            coefficient_T = torch.where(trained_T, advantages_T * ratio_T.clamp_max(cap), 0.0)
            metrics = {
                **region_metrics(streams, decision),
                **ratio_metrics(streams, log_ratio_T, decision.finite_T),
                "divergence/mc": mean_of(self.region.generator.mc(log_ratio_T), streams.mask_T & decision.finite_T),
                "ratio/capped": fraction_of((ratio_T > cap) | dropped_T, streams.mask_T & decision.finite_T),
                **policy_metrics(streams, decision.finite_T),
            }
        return TokenLoss(-coefficient_T * only(trained_T, streams.logprobs_T), metrics, decision.keep_T)


def region_metrics(streams: TokenStreams, decision: Decision) -> dict[str, Metric[torch.Tensor]]:
    """The trust region's decision alone."""
    return {
        "kept/positive": fraction_of(decision.keep_T, streams.mask_T & (streams.advantages_T > 0)),
        "kept/negative": fraction_of(decision.keep_T, streams.mask_T & (streams.advantages_T < 0)),
        "divergence/mean": mean_of(decision.divergence_T, streams.mask_T & decision.finite_T),
    }


def ratio_metrics(
    streams: TokenStreams, log_ratio_T: torch.Tensor, finite_T: torch.Tensor
) -> dict[str, Metric[torch.Tensor]]:
    """pi / mu of the loss tokens that are finite."""
    ratio_T = bounded_ratio(log_ratio_T)
    return {
        "ratio/mean": mean_of(ratio_T, streams.mask_T & finite_T),
        "ratio/max": largest_of(ratio_T, streams.mask_T & finite_T),
    }


def policy_metrics(streams: TokenStreams, finite_T: torch.Tensor) -> dict[str, Metric[torch.Tensor]]:
    """What is worth knowing of the policy under any objective. finite_T: the tokens that the objective can use."""
    valid_T = streams.mask_T & finite_T
    logprobs_T = at_least_float32(streams.logprobs_T.detach())
    gap_T = (logprobs_T - streams.sampler_logprobs_T).abs()
    # Only before the policy has moved does the gap show how sampler and trainer disagree on the same weights.
    unmoved_T = valid_T & (streams.age_T == 0)
    metrics: dict[str, Metric[torch.Tensor]] = {
        "policy/entropy": mean_of(streams.entropy_T, valid_T),
        "policy/sampler_gap": mean_of(gap_T, unmoved_T),
        "policy/sampler_gap_max": largest_of(gap_T, unmoved_T),
        "policy/age": mean_of(streams.age_T.float(), valid_T),
        "policy/log_ratio": mean_of(logprobs_T - streams.anchor_logprobs_T, valid_T),
        "policy/non_finite": Sum((streams.mask_T & ~finite_T).sum().float()),
    }
    if streams.squares_T is not None:
        metrics["policy/collision"] = mean_of(streams.squares_T, valid_T)
    return metrics


def bounded_ratio(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """exp(log r), r between e^-20 and e^20."""
    return torch.exp(log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@dataclass(frozen=True)
class MaximumLikelihood:
    """loss = -log pi on the mask, whatever the advantages: supervised training on given answers.

    A token whose log-prob is not finite gets no loss and is counted in `policy/non_finite`.
    """

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        valid_T = streams.mask_T & streams.logprobs_T.isfinite()
        loss_T = -only(valid_T, streams.logprobs_T)
        metrics: dict[str, Metric[torch.Tensor]] = {
            "policy/entropy": mean_of(streams.entropy_T, valid_T),
            "policy/nll": mean_of(loss_T, valid_T),
            "policy/non_finite": Sum((streams.mask_T & ~valid_T).sum().float()),
        }
        return TokenLoss(loss_T, metrics)


def _or_infinity(limit: float | None) -> float:
    return torch.inf if limit is None else limit
