"""Weights of the sampler's mismatch and rejection of sequences, by hand and over micro-batches."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from gppo_megatron.objective.corrections import (
    Corrected,
    Corrector,
    MaskedSampling,
    OffPolicyRejection,
    SequenceRejection,
    TruncatedSampling,
)
from gppo_megatron.objective.policy_gradient import PolicyGradient, TokenStreams
from gppo_megatron.objective.presets import PRESETS, Cell
from gppo_megatron.objective.trust_region import TrustRegion
from tests.numeric.streams import (
    MASKS,
    POISONS,
    SEQUENCE_OF,
    Poison,
    assert_poison_stays,
    gradient_of,
    numbers_of,
    random_streams,
    streams_of,
)

PLAIN = PolicyGradient(TrustRegion(Cell("tv", "mc", 1e9, 1e9)))
RATIOS = (1.5, 3.0, 0.4, 1.0, 0.25, 0.9)
"""k of six tokens in sequences of 2, 3 and 1."""


def mismatched(ratios: tuple[float, ...] = RATIOS, mask: list[bool] | None = None) -> TokenStreams:
    """pi = mu = e^-1, the sampler's probability is that over k."""
    streams = streams_of([-1.0] * 6, [-1.0] * 6, [1.0, 1.0, -1.0, -1.0, -1.0, 2.0], mask, lengths=(2, 3, 1))
    sampler_T = torch.tensor([-1.0 - math.log(ratio) for ratio in ratios], dtype=torch.float64)
    return replace(streams, sampler_logprobs_T=sampler_T)


def weights(corrector: Corrector, streams: TokenStreams) -> list[float]:
    """What the plain loss of each token is multiplied by."""
    corrected_T = gradient_of(Corrected(PLAIN, (corrector,)), streams)
    return (corrected_T / gradient_of(PLAIN, streams)).tolist()


def test_truncation_and_masking_by_token() -> None:
    assert weights(TruncatedSampling("token", 2.0), mismatched()) == pytest.approx([1.5, 2.0, 0.4, 1.0, 0.25, 0.9])
    assert weights(MaskedSampling("token", 0.3, 2.0), mismatched()) == pytest.approx([1.5, 0.0, 0.4, 1.0, 0.0, 0.9])


def test_truncation_and_masking_by_sequence() -> None:
    """Products: 4.5, .1 and .9."""
    truncated = weights(TruncatedSampling("sequence", 2.0), mismatched())
    assert truncated == pytest.approx([2.0, 2.0, 0.1, 0.1, 0.1, 0.9])
    assert weights(MaskedSampling("sequence", 0.5, 5.0), mismatched()) == pytest.approx([4.5, 4.5, 0, 0, 0, 0.9])


def test_bounds_themselves_are_kept() -> None:
    assert weights(MaskedSampling("token", 0.5, 2.0), mismatched((2.0, 0.5, 2.001, 0.499, 1, 1)))[:4] == pytest.approx(
        [2.0, 0.5, 0.0, 0.0]
    )


def test_only_tokens_with_loss_make_a_sequences_weight() -> None:
    streams = mismatched(mask=[True, False, True, True, True, True])
    corrected = Corrected(PLAIN, (TruncatedSampling("sequence", 9.0),))
    assert (gradient_of(corrected, streams) / -streams.advantages_T).tolist() == pytest.approx(
        [1.5, 0, 0.1, 0.1, 0.1, 0.9]
    )


def test_rejection_by_the_mean_and_by_the_largest() -> None:
    """k - 1 - log k of each token; the largest of the second sequence is its third token's .636."""
    divergences = [ratio - 1 - math.log(ratio) for ratio in RATIOS]
    means = [sum(divergences[:2]) / 2, sum(divergences[2:5]) / 3, divergences[5]]
    assert means == pytest.approx([0.498, 0.317, 0.00536], abs=1e-3)
    assert weights(SequenceRejection("mean", 0.4), mismatched()) == [0, 0, 1, 1, 1, 1]
    assert weights(SequenceRejection("mean", 0.3), mismatched()) == [0, 0, 0, 0, 0, 1]
    assert weights(SequenceRejection("largest", 0.7), mismatched()) == [0, 0, 1, 1, 1, 1]
    assert weights(SequenceRejection("largest", 0.6), mismatched()) == [0, 0, 0, 0, 0, 1]
    numbers = numbers_of(SequenceRejection("mean", 0.4)(mismatched()).metrics)
    assert numbers["reject/rejected"] == pytest.approx(2 / 6)
    assert numbers["reject/divergence"] == pytest.approx((2 * means[0] + 3 * means[1] + means[2]) / 6)


def test_off_policy_sequences_are_dropped_where_the_advantage_is_negative() -> None:
    """Means of log(sampler / pi): -.75, .77, .105; the first sequence has A > 0 and stays, however far."""
    streams = mismatched()
    assert weights(OffPolicyRejection(0.1), streams) == [1, 1, 0, 0, 0, 1]
    assert weights(OffPolicyRejection(0.8), streams) == [1, 1, 1, 1, 1, 1]
    flipped = replace(streams, advantages_T=-streams.advantages_T)
    assert weights(OffPolicyRejection(0.1), flipped) == [1, 1, 1, 1, 1, 0]
    assert numbers_of(OffPolicyRejection(0.1)(streams).metrics)["opsm/rejected"] == pytest.approx(3 / 6)


def test_corrections_multiply_and_report() -> None:
    corrected = Corrected(PLAIN, (TruncatedSampling("token", 2.0), OffPolicyRejection(0.1)))
    streams = mismatched()
    assert (-gradient_of(corrected, streams)).tolist() == pytest.approx([1.5, 2.0, 0, 0, 0, 1.8])
    numbers = numbers_of(corrected(streams).metrics)
    assert numbers["tis/weight"] == pytest.approx((1.5 + 2.0 + 0.4 + 1.0 + 0.25 + 0.9) / 6)
    assert numbers["tis/truncated"] == pytest.approx(1 / 6)
    assert numbers["kept/positive"] == 1.0
    masked = numbers_of(Corrected(PLAIN, (MaskedSampling("token", 0.3, 2.0),))(streams).metrics)
    assert masked["mis/weight"] == pytest.approx((1.5 + 0.4 + 1.0 + 0.9) / 6)
    assert masked["mis/masked"] == pytest.approx(2 / 6)


def test_no_gradient_passes_through_a_weight() -> None:
    streams = mismatched()
    corrected_T = gradient_of(Corrected(PLAIN, (OffPolicyRejection(9.0),)), streams)
    assert torch.equal(corrected_T, gradient_of(PLAIN, streams))


@pytest.mark.parametrize(
    "corrector",
    [
        TruncatedSampling("sequence", 2.0),
        MaskedSampling("sequence", 0.2, 5.0),
        SequenceRejection("mean", 0.05),
        SequenceRejection("largest", 0.1),
        OffPolicyRejection(0.05),
    ],
    ids=repr,
)
def test_any_split_into_micro_batches_has_the_same_gradient(corrector: Corrector) -> None:
    whole = random_streams(11, (4, 3, 5), masked=0.2)
    whole = replace(whole, sampler_logprobs_T=whole.anchor_logprobs_T + 0.5 * torch.sin(torch.arange(12.0)))
    objective = Corrected(PolicyGradient(TrustRegion(PRESETS["gppo"].cell)), (corrector,))
    gradient_T = gradient_of(objective, whole)
    for place, rows in ((slice(0, 4), (4,)), (slice(4, 12), (3, 5))):
        part = TokenStreams(
            whole.logprobs_T[place].detach().requires_grad_(),
            *(stream[place] for stream in (whole.entropy_T, whole.anchor_logprobs_T, whole.sampler_logprobs_T)),
            *(stream[place] for stream in (whole.advantages_T, whole.age_T, whole.mask_T)),
            rows,
        )
        torch.testing.assert_close(gradient_of(objective, part), gradient_T[place], rtol=1e-13, atol=0)


DECISIVE = {"logprobs_T", "anchor_logprobs_T", "advantages_T", "sampler_logprobs_T"}


@settings(max_examples=60, deadline=None)
@given(POISONS, MASKS)
def test_values_that_are_not_finite_never_leak(poison: list[Poison], mask: list[bool]) -> None:
    inner = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
    by_token = Corrected(inner, (TruncatedSampling("token", 2.0), MaskedSampling("token", 0.5, 5.0)))
    lost = {position for position, stream, _ in poison if stream in DECISIVE}
    result = assert_poison_stays(by_token, poison, mask, lost)
    without = {position for position, stream, _ in poison if stream in {"sampler_logprobs_T", "anchor_logprobs_T"}}
    assert numbers_of(result.metrics)["correction/non_finite"] == sum(mask[position] for position in without)

    correctors = (TruncatedSampling("sequence", 2.0), SequenceRejection("largest", 9.0), OffPolicyRejection(9.0))
    needed = {"sampler_logprobs_T", "anchor_logprobs_T", "logprobs_T"}
    ill = {SEQUENCE_OF[position] for position, stream, _ in poison if stream in needed and mask[position]}
    lost |= {position for position in range(6) if SEQUENCE_OF[position] in ill}
    assert_poison_stays(Corrected(inner, correctors), poison, mask, lost)


def test_enormous_mismatches_stay_finite() -> None:
    streams = mismatched((1e30, 1e-30, 1e12, 1e12, 1e12, 1.0))
    every = (TruncatedSampling("sequence", 1e30), MaskedSampling("token", 1e-30, 1e30), SequenceRejection("mean", 1e30))
    assert gradient_of(Corrected(PLAIN, every), streams).isfinite().all()
