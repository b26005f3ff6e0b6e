"""Objectives that look at whole sequences: ratios formed over all tokens of a response."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gppo_megatron.objective.divergences import LOG_RATIO_LIMIT, Generator
from gppo_megatron.objective.policy_gradient import (
    Objective,
    TokenLoss,
    TokenStreams,
    bounded_ratio,
    policy_metrics,
    ratio_metrics,
    region_metrics,
)
from gppo_megatron.objective.selected import at_least_float32, fraction_of, mean_of, only
from gppo_megatron.objective.trust_region import TrustRegion


@dataclass(frozen=True, eq=False)
class Sequences:
    """Which sequence each token belongs to, B sequences in all.

    sequence_T: int64; mask_T: bool, tokens with loss; counts_B: how many of those a sequence has.
    """

    sequence_T: torch.Tensor
    mask_T: torch.Tensor
    counts_B: torch.Tensor

    @classmethod
    def of(cls, streams: TokenStreams) -> "Sequences":
        """Raises ValueError where the streams' lengths are not those of their tokens."""
        tokens = len(streams.mask_T)
        if sum(streams.lengths) != tokens:
            raise ValueError(f"the sequences hold {sum(streams.lengths)} tokens, but the streams {tokens}")
        lengths_B = torch.tensor(streams.lengths, device=streams.mask_T.device)
        sequence_T = torch.repeat_interleave(lengths_B, output_size=tokens)
        counts_B = torch.zeros(len(lengths_B), dtype=torch.int64, device=lengths_B.device)
        return cls(sequence_T, streams.mask_T, counts_B.index_add_(0, sequence_T, streams.mask_T.long()))

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """[B], over each sequence's tokens with loss; 0 where it has none."""
        values_T = only(self.mask_T, values_T)
        return values_T.new_zeros(len(self.counts_B)).index_add(0, self.sequence_T, values_T)

    def means(self, values_T: torch.Tensor) -> torch.Tensor:
        """At each token, the mean over its sequence's tokens with loss; without gradient."""
        return (self.sums(values_T.detach()) / self.counts_B.clamp_min(1))[self.sequence_T]

    def largest(self, values_T: torch.Tensor) -> torch.Tensor:
        """At each token, the largest of its sequence's tokens with loss, 0 at least; without gradient."""
        values_T = only(self.mask_T, values_T.detach())
        largest_B = values_T.new_zeros(len(self.counts_B))
        return largest_B.scatter_reduce(0, self.sequence_T, values_T, "amax")[self.sequence_T]

    def later(self, values_T: torch.Tensor) -> torch.Tensor:
        """At each token, the sum over its sequence's later tokens with loss; added up in float64, without gradient."""
        exact_T = only(self.mask_T, values_T.detach()).double()
        ends_B = self.sums(exact_T).cumsum(0)
        return (ends_B[self.sequence_T] - exact_T.cumsum(0)).to(values_T.dtype)

    def all_have(self, flags_T: torch.Tensor) -> torch.Tensor:
        """At each token, whether all of its sequence's tokens with loss have the flag."""
        return (self.sums((~flags_T).float()) == 0)[self.sequence_T]


@dataclass(frozen=True)
class SequenceRatio:
    """GSPO (arXiv 2507.18071): `inner` with the whole sequence's ratio in place of each token's.

    s = exp(mean over the sequence's tokens of log r), the ratio's geometric mean. Every token's log-probs become the
    sequence's means in value, while the gradient stays the token's own: with a masking `inner`, -A s log pi where the
    trust region keeps s. Under the aggregation `sequence_mean` that is the gradient of the paper's eq. 5.
    A sequence with a loss token that is not finite has no ratio and gets no loss.
    """

    inner: Objective

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        sequences = Sequences.of(streams)
        own_T = at_least_float32(streams.logprobs_T)
        # own - own: a value of 0 with the token's gradient; NaN where the sequence's mean is not finite either.
        level = replace(
            streams,
            logprobs_T=sequences.means(own_T) + (own_T - own_T.detach()),
            anchor_logprobs_T=sequences.means(streams.anchor_logprobs_T),
        )
        loss = self.inner(level)
        with torch.no_grad():
            finite_T = level.logprobs_T.isfinite() & level.anchor_logprobs_T.isfinite()
            metrics = {**loss.metrics, **policy_metrics(streams, finite_T & streams.advantages_T.isfinite())}
        return replace(loss, metrics=metrics)


@dataclass(frozen=True)
class GeometricMean:
    """GMPO (arXiv 2507.20673): loss = -A g log pi on the tokens the trust region keeps.

    g = exp(mean over the sequence's tokens of the clipped log r): a token that is masked counts with the bound it
    crossed, log lo or log hi, where [lo, hi] are the ratios with f(r) <= delta. ratio_cap: g is at most this.
    Under `sequence_mean` and one advantage a sequence that is the gradient of the paper's objective.
    A sequence with a loss token that is not finite gets no loss.
    Raises ValueError unless the region's estimator is mc, and for a ratio guard.
    """

    region: TrustRegion
    ratio_cap: float | None = None

    def __post_init__(self) -> None:
        if self.region.cell.estimator != "mc":
            raise ValueError(f"the geometric mean clips ratios: estimator mc, not {self.region.cell.estimator!r}")
        if self.region.cell.ratio_guard is not None:
            raise ValueError("the geometric mean has no ratio_guard")

    @cached_property
    def _clip(self) -> tuple[float, float]:
        """[log lo, log hi]."""
        generator, cell = self.region.generator, self.region.cell
        return log_ratio_bounds(generator, cell.delta_low)[0], log_ratio_bounds(generator, cell.delta_high)[1]

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        sequences, (low, high) = Sequences.of(streams), self._clip
        decision = self.region.decide(streams.logprobs_T, streams.anchor_logprobs_T, streams.advantages_T)
        with torch.no_grad():
            log_ratio_T = at_least_float32(streams.logprobs_T) - at_least_float32(streams.anchor_logprobs_T)
            bound_T = torch.where(streams.advantages_T > 0, high, torch.full_like(log_ratio_T, low))
            clipped_T = torch.where(decision.keep_T, log_ratio_T, bound_T)
            mean_T = bounded_ratio(sequences.means(clipped_T))
            cap = torch.inf if self.ratio_cap is None else self.ratio_cap
            usable_T = sequences.all_have(decision.finite_T)
            trained_T = streams.mask_T & decision.keep_T & usable_T
            coefficient_T = torch.where(trained_T, streams.advantages_T * mean_T.clamp_max(cap), 0.0)
            valid_T = streams.mask_T & usable_T
            metrics = {
                **region_metrics(streams, decision),
                **ratio_metrics(streams, log_ratio_T, usable_T),
                "ratio/geometric_mean": mean_of(mean_T, valid_T),
                "ratio/capped": fraction_of(mean_T > cap, valid_T),
                **policy_metrics(streams, usable_T),
            }
        return TokenLoss(-coefficient_T * only(trained_T, streams.logprobs_T), metrics, decision.keep_T)


def log_ratio_bounds(generator: Generator, delta: float) -> tuple[float, float]:
    """The log-ratios [low, high] around 0 where f(r) <= delta, by bisection to the last bit of float64.

    A bound that f never reaches (f(0) <= delta, say) is the limit at which log r saturates.
    """

    def bound(far: float) -> float:
        inside, outside = 0.0, far
        for _ in range(100):
            middle = (inside + outside) / 2
            value = float(generator.mc(torch.tensor([middle], dtype=torch.float64)))
            inside, outside = (middle, outside) if value <= delta else (inside, middle)
        return inside

    if math.isinf(delta):
        return -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    return bound(-LOG_RATIO_LIMIT), bound(LOG_RATIO_LIMIT)
