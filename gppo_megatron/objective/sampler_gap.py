"""How far the sampler's log-probs are from the trainer's, on tokens that the very same weights sampled."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from gppo_megatron.metrics import Mean, Metric
from gppo_megatron.objective.policy_gradient import Objective, TokenLoss, TokenStreams
from gppo_megatron.objective.selected import at_least_float32, fraction_of

BANDS = (0.0, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Edges of the bands of the sampler's probability; the lower edge belongs to its band, and 1 to the last."""
TAILS = (1e-3, 1e-2, 1e-1)
"""Nats."""


@dataclass(frozen=True)
class GapMeasured:
    """`objective`, and among its metrics the tail of the gap and its mean by the token's probability.

    The gap is abs(log pi - log-prob when sampled) of loss tokens that the current weights sampled, so that nothing but
    sampler and trainer can differ. `policy/sampler_gap` and its maximum are the objective's own.
    """

    objective: Objective

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        loss = self.objective(streams)
        with torch.no_grad():
            return replace(loss, metrics={**loss.metrics, **gap_metrics(streams)})


def gap_metrics(streams: TokenStreams) -> Mapping[str, Metric[torch.Tensor]]:
    """`gap/above_<nats>`: share of tokens. `gap/mu_<low>_to_<high>`: nats a token."""
    gap_T = (at_least_float32(streams.logprobs_T.detach()) - streams.sampler_logprobs_T).abs()
    measured_T = streams.mask_T & (streams.age_T == 0) & gap_T.isfinite()
    bands = list(itertools.pairwise(BANDS))
    band_T = torch.bucketize(streams.sampler_logprobs_T.exp(), gap_T.new_tensor(BANDS[1:-1]), right=True)
    zeros = gap_T.new_zeros(len(bands))
    totals = zeros.index_add(0, band_T, torch.where(measured_T, gap_T, 0.0))
    counts = zeros.index_add(0, band_T, measured_T.to(gap_T.dtype))
    tails = {f"gap/above_{tail:g}": fraction_of(gap_T > tail, measured_T) for tail in TAILS}
    means = {f"gap/mu_{low:g}_to_{high:g}": Mean(totals[n], counts[n]) for n, (low, high) in enumerate(bands)}
    return {**tails, **means}
