"""What a trust region does at each step, measured beside the loss: no gradient, no influence on it.

Every number is a sum, a weighted mean or a maximum, so that ranks combine exactly. On few tokens the number of
operations is what costs, so those of all micro-batches of a step are looked at together, once for all probes.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from gppo_megatron.metrics import Max, Mean, Metric
from gppo_megatron.objective.divergences import Generator
from gppo_megatron.objective.estimators import token_estimates
from gppo_megatron.objective.policy_gradient import Objective, TokenLoss, TokenStreams, bounded_ratio, joined
from gppo_megatron.objective.presets import TOKEN_ESTIMATORS
from gppo_megatron.objective.selected import at_least_float32, fraction_of, only
from gppo_megatron.objective.sequence import Sequences
from gppo_megatron.objective.trust_region import TrustRegion

BANDS = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Edges of the bands of the token's probability mu; the lower edge belongs to its band, and 1 to the last."""
MASKED = [
    f"masked/{sign}_mu_{low:g}_to_{high:g}"
    for sign in ("positive", "negative")
    for low, high in itertools.pairwise(BANDS)
]


@dataclass(frozen=True, eq=False)
class Measured:
    """Tokens as the probes see them.

    valid_T: bool, tokens that carry loss and have both log-probs and an advantage.
    estimates_ET: the divergence by each of `TOKEN_ESTIMATORS`, in their order; anything at all where not valid.
    kept_T: of the loss.
    """

    streams: TokenStreams
    log_pi_T: torch.Tensor
    log_mu_T: torch.Tensor
    valid_T: torch.Tensor
    estimates_ET: torch.Tensor
    kept_T: torch.Tensor | None

    @classmethod
    def of(cls, streams: TokenStreams, kept_T: torch.Tensor | None, generator: Generator) -> "Measured":
        log_pi_T, log_mu_T = at_least_float32(streams.logprobs_T.detach()), at_least_float32(streams.anchor_logprobs_T)
        # 0 times a number is 0, and 0 times anything else is not.
        numbers_T = (log_pi_T + log_mu_T + streams.advantages_T) * 0 == 0
        estimates_ET = torch.stack(token_estimates(generator, log_pi_T, log_mu_T))
        return cls(streams, log_pi_T, log_mu_T, streams.mask_T & numbers_T, estimates_ET, kept_T)


class Probe(Protocol):
    """Measures a step's tokens; called without gradient."""

    def __call__(self, measured: Measured) -> Mapping[str, Metric[torch.Tensor]]: ...


@dataclass(frozen=True)
class Diagnosed:
    """`objective`, whose tokens the probes see at the step's end; generator: of the divergence they are about."""

    objective: Objective
    generator: Generator
    probes: tuple[Probe, ...]

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        loss = self.objective(streams)
        if not self.probes:
            return loss
        return replace(loss, seen=SeenTokens(streams.detached(), loss.kept_T, self))

    @torch.no_grad()
    def measure(self, streams: TokenStreams, kept_T: torch.Tensor | None) -> Mapping[str, Metric[torch.Tensor]]:
        measured = Measured.of(streams, kept_T, self.generator)
        metrics: dict[str, Metric[torch.Tensor]] = {}
        for probe in self.probes:
            metrics |= probe(measured)
        return metrics


@dataclass(frozen=True, eq=False)
class SeenTokens:
    """A `Seen`: a micro-batch's streams without gradient, what the loss kept, and who measures them."""

    streams: TokenStreams
    kept_T: torch.Tensor | None
    by: Diagnosed

    def measure(self, step: "Sequence[SeenTokens]") -> Mapping[str, Metric[torch.Tensor]]:
        kept = [one.kept_T for one in step if one.kept_T is not None]
        return self.by.measure(joined([one.streams for one in step]), torch.cat(kept) if kept else None)


OfHead = Callable[[TokenStreams], torch.Tensor]
"""Finds a divergence that the LM head worked out among the streams, NaN at tokens where it did not. ValueError where
the head was not asked."""


def of_region(streams: TokenStreams) -> torch.Tensor:
    """An `OfHead`: what the run's own trust region reads."""
    if streams.divergence_T is None:
        raise ValueError("the head worked no divergence out for the trust region")
    return streams.divergence_T


def of_sample(streams: TokenStreams) -> torch.Tensor:
    """An `OfHead`: the exact divergence beside another estimator."""
    if streams.exact_T is None:
        raise ValueError("the head worked no exact divergence out")
    return streams.exact_T


@dataclass(frozen=True)
class Estimates:
    """Mean, largest, and share above each threshold, of the divergence by each estimator.

    estimators: some of `TOKEN_ESTIMATORS`. of_head: by name, further ones, over the tokens that have them.
    """

    estimators: tuple[str, ...]
    thresholds: tuple[float, ...]
    of_head: tuple[tuple[str, OfHead], ...] = ()

    def __call__(self, measured: Measured) -> Mapping[str, Metric[torch.Tensor]]:
        names = [*self.estimators, *(name for name, _ in self.of_head)]
        own_ET = measured.estimates_ET
        if self.estimators != TOKEN_ESTIMATORS:
            own_ET = own_ET[[TOKEN_ESTIMATORS.index(name) for name in self.estimators]]
        further = [find(measured.streams)[None] for _, find in self.of_head]
        value_ET = torch.cat([own_ET, *further]) if further else own_ET
        finite_ET = value_ET < torch.inf  # not NaN either
        # Of the valid tokens: the tails, any number at all, a finite number.
        bounds_F11 = value_ET.new_tensor([*self.thresholds, -torch.inf])[:, None, None]
        flags_FET = torch.cat([value_ET > bounds_F11, finite_ET[None]]) & measured.valid_T
        selected_ET = flags_FET[-1]
        totals = torch.where(selected_ET, value_ET, 0.0).sum(1).unbind()
        largest = torch.where(selected_ET, value_ET, -torch.inf).amax(1).unbind()
        *above, valid, counts = (of_all.unbind() for of_all in flags_FET.sum(2, dtype=totals[0].dtype).unbind())
        metrics: dict[str, Metric[torch.Tensor]] = {}
        for place, name in enumerate(names):
            metrics[f"estimate/{name}"] = Mean(totals[place], counts[place])
            metrics[f"estimate/{name}_max"] = Max(largest[place])
            for threshold, of_all in zip(self.thresholds, above, strict=True):
                metrics[f"estimate/{name}_above_{threshold:g}"] = Mean(of_all[place], valid[place])
        return metrics


@dataclass(frozen=True)
class MaskedShares:
    """Share of tokens that the trust region masks, by the advantage's sign and the band of mu; nothing without one."""

    def __call__(self, measured: Measured) -> Mapping[str, Metric[torch.Tensor]]:
        if measured.kept_T is None:
            return {}
        advantages_T, bands = measured.streams.advantages_T, len(BANDS) - 1
        band_T = torch.bucketize(measured.log_mu_T.exp(), measured.log_mu_T.new_tensor(BANDS[1:-1]), right=True)
        cell_T = band_T + bands * (advantages_T < 0)
        counted_T = measured.valid_T & (advantages_T != 0)
        flags_T2 = torch.stack([counted_T, counted_T & ~measured.kept_T], 1).float()
        tokens, masked = flags_T2.new_zeros(2 * bands, 2).index_add_(0, cell_T, flags_T2).unbind(1)
        return {name: Mean(*counts) for name, *counts in zip(MASKED, masked.unbind(), tokens.unbind(), strict=True)}


@dataclass(frozen=True)
class BoundTerms:
    """Terms of the improvement bound, over the sequences whose loss tokens are all finite.

    J(pi) - J(mu) = L - Delta with L = E sum_t A_t (r_t - 1) and Delta = E sum_t A_t (r_t - 1) (1 - prod_{j > t} r_j),
    where A stands for R - b. `bound/divergence` is the mean over sequences of sum_t f(r_t).
    """

    def __call__(self, measured: Measured) -> Mapping[str, Metric[torch.Tensor]]:
        sequences = Sequences.of(measured.streams)
        # Valid tokens are loss tokens.
        valid_B = torch.zeros_like(sequences.counts_B).index_add_(0, sequences.sequence_T, measured.valid_T.long())
        usable_B = (valid_B == sequences.counts_B) & (valid_B > 0)
        usable_T = measured.valid_T & usable_B[sequences.sequence_T]
        mc_T = measured.estimates_ET[TOKEN_ESTIMATORS.index("mc")]
        log_ratio_T, advantages_T, mc_T = only(
            usable_T, torch.stack([measured.log_pi_T - measured.log_mu_T, measured.streams.advantages_T, mc_T])
        ).unbind()
        now_T, later_T = bounded_ratio(torch.stack([log_ratio_T, sequences.later(log_ratio_T)])).sub_(1).unbind()
        gain_T = advantages_T * now_T
        surrogate, remainder, divergence = torch.stack([gain_T, -gain_T * later_T, mc_T]).sum(1).unbind()
        used = usable_B.sum(dtype=surrogate.dtype)
        return {
            "bound/surrogate": Mean(surrogate, used),
            "bound/remainder": Mean(remainder, used),
            "bound/divergence": Mean(divergence, used),
            "bound/advantage_max": Max(torch.where(usable_T, advantages_T.abs(), -torch.inf).amax()),
            "bound/length_max": Max(torch.where(usable_B, sequences.counts_B, -torch.inf).amax()),
        }


@dataclass(frozen=True)
class Disagreement:
    """Share of tokens with an advantage that two trust regions decide differently: `decision/differs_<name>`.

    of_head: the divergence that `best` decides by; tokens without it are not compared.
    """

    name: str
    cheap: TrustRegion
    best: TrustRegion
    of_head: OfHead

    def __call__(self, measured: Measured) -> Mapping[str, Metric[torch.Tensor]]:
        log_probs, advantages_T = (measured.log_pi_T, measured.log_mu_T), measured.streams.advantages_T
        cheap = self.cheap.decide(*log_probs, advantages_T)
        best = self.best.decide(*log_probs, advantages_T, self.of_head(measured.streams))
        selected_T = measured.valid_T & best.finite_T & (advantages_T != 0)
        return {f"decision/differs_{self.name}": fraction_of(cheap.keep_T != best.keep_T, selected_T)}
