"""Sequence-level objectives against the papers' own formulations, differentiated by autograd in float64."""

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings

from gppo_megatron.objective.divergences import GENERATORS, Generator, generator_of
from gppo_megatron.objective.policy_gradient import Objective, PolicyGradient, TokenStreams
from gppo_megatron.objective.presets import PRESETS, Cell
from gppo_megatron.objective.reduce import token_shares, total
from gppo_megatron.objective.sequence import GeometricMean, SequenceRatio, Sequences, log_ratio_bounds
from gppo_megatron.objective.trust_region import TrustRegion
from tests.numeric.streams import (
    MASKS,
    POISONS,
    Poison,
    assert_poison_stays,
    by_sequence,
    gradient_of,
    numbers_of,
    random_streams,
    streams_of,
)

LENGTHS = (3, 1, 7, 5, 2, 9, 4, 6)
GSPO = SequenceRatio(PolicyGradient(TrustRegion(PRESETS["gspo"].cell)))
GMPO = GeometricMean(TrustRegion(PRESETS["gmpo"].cell))
DECISIVE = {"logprobs_T", "anchor_logprobs_T"}


def sequence_mean(objective: Objective, streams: TokenStreams) -> torch.Tensor:
    """The mean over sequences of each one's mean loss, by the trainer's own shares."""
    sequences = sum(bool(part.any()) for part in streams.mask_T.split(streams.lengths))
    shares_T = token_shares(
        streams.mask_T, streams.lengths, int(streams.mask_T.sum()), sequences, "sequence_mean"
    ).double()
    return total(objective(streams).loss_T, shares_T)


def by_the_paper(streams: TokenStreams, of_sequence: Callable[[torch.Tensor, float], torch.Tensor]) -> torch.Tensor:
    """-mean over sequences of `of_sequence(log-ratios of the tokens with loss, advantage)`."""
    parts = [
        part.split(streams.lengths)
        for part in (streams.logprobs_T, streams.anchor_logprobs_T, streams.advantages_T, streams.mask_T)
    ]
    values = [
        of_sequence((log_pi - log_mu)[mask], float(advantages[0]))
        for log_pi, log_mu, advantages, mask in zip(*parts, strict=True)
        if mask.any()
    ]
    return -torch.stack(values).mean()


def gspo(log_ratios: torch.Tensor, advantage: float) -> torch.Tensor:
    """min(s A, clip(s, 1 - 1.5e-4, 1 + 2e-4) A) with the cell's deltas doubled: eq. 5 of arXiv 2507.18071."""
    ratio = log_ratios.mean().exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)


def gmpo(log_ratios: torch.Tensor, advantage: float) -> torch.Tensor:
    """The geometric mean of min(r A, clip(r, e^-.4, e^.4) A) / A, times A: eq. 4 of arXiv 2507.20673."""
    clipped = log_ratios.clamp(-0.4, 0.4)
    kept = torch.minimum(log_ratios, clipped) if advantage > 0 else torch.maximum(log_ratios, clipped)
    return advantage * kept.mean().exp()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("objective", "paper", "spread"), [(GSPO, gspo, 5e-4), (GSPO, gspo, 0.5), (GMPO, gmpo, 0.5)], ids=repr
)
def test_gradient_equals_the_papers_objective(
    objective: Objective, paper: Callable[[torch.Tensor, float], torch.Tensor], spread: float, seed: int
) -> None:
    streams = random_streams(seed, LENGTHS, spread)
    (ours_T,) = torch.autograd.grad(sequence_mean(objective, streams), streams.logprobs_T)
    (theirs_T,) = torch.autograd.grad(by_the_paper(streams, paper), streams.logprobs_T)
    assert (ours_T != 0).sum() > 3
    # The trainer's shares are float32.
    torch.testing.assert_close(ours_T, theirs_T, rtol=2e-7, atol=0)


def test_gspo_by_hand() -> None:
    """Two tokens with log-ratios .3 and -.1: s = e^.1, every token weighs A s whatever its own ratio; A < 0 is kept."""
    streams = streams_of([-1.0, -2.0, -1.0], [-1.3, -1.9, -1.0], [-2.0, -2.0, 1.0], lengths=(2, 1))
    assert (-gradient_of(GSPO, streams)).tolist() == pytest.approx([-2 * math.exp(0.1), -2 * math.exp(0.1), 1.0])
    up = streams_of([-1.0, -2.0], [-1.3, -1.9], [2.0, 2.0], lengths=(2,))
    assert gradient_of(GSPO, up).tolist() == [0.0, 0.0]
    assert numbers_of(GSPO(up).metrics)["kept/positive"] == 0.0
    capped = SequenceRatio(PolicyGradient(TrustRegion(Cell("tv", "mc", 9.0, 9.0)), ratio_cap=1.05))
    assert (-gradient_of(capped, streams)).tolist() == pytest.approx([-2.1, -2.1, 1.0])


def test_gmpo_by_hand() -> None:
    """A > 0, log-ratios 1 (masked, counts as .4), .2 and -.9 (inward: neither masked nor clipped)."""
    streams = streams_of([-1.0, -1.8, -2.9], [-2.0, -2.0, -2.0], [3.0] * 3, lengths=(3,))
    mean = math.exp((0.4 + 0.2 - 0.9) / 3)
    assert (-gradient_of(GMPO, streams)).tolist() == pytest.approx([0.0, 3 * mean, 3 * mean])
    numbers = numbers_of(GMPO(streams).metrics)
    assert numbers["ratio/geometric_mean"] == pytest.approx(mean)
    assert numbers["kept/positive"] == pytest.approx(2 / 3)
    assert numbers["ratio/max"] == pytest.approx(math.e)


def test_gmpo_with_a_cap() -> None:
    streams = streams_of([-1.0, -1.0], [-1.3, -1.1], [-1.0, -1.0])
    assert (-gradient_of(GeometricMean(GMPO.region, 1.1), streams)).tolist() == pytest.approx([-1.1, -1.1])
    assert numbers_of(GeometricMean(GMPO.region, 1.1)(streams).metrics)["ratio/capped"] == 1.0


@pytest.mark.parametrize("objective", [GSPO, GMPO], ids=["gspo", "gmpo"])
def test_any_split_into_micro_batches_has_the_same_gradient(objective: Objective) -> None:
    whole = random_streams(3, LENGTHS, 0.3)
    for rows in ([0, 3], [7], [1, 2, 4, 5, 6]):
        chosen_T = torch.cat(
            [torch.full((length,), row in rows, dtype=torch.bool) for row, length in enumerate(LENGTHS)]
        )
        parts = {
            field.name: getattr(whole, field.name)[chosen_T].detach()
            for field in fields(whole)
            if isinstance(getattr(whole, field.name), torch.Tensor)
        }
        parts["logprobs_T"].requires_grad_()
        part = replace(whole, **parts, lengths=tuple(LENGTHS[row] for row in rows))
        torch.testing.assert_close(
            gradient_of(objective, part), gradient_of(objective, whole)[chosen_T], rtol=1e-13, atol=0
        )


@settings(max_examples=60, deadline=None)
@given(POISONS, MASKS)
def test_what_is_not_finite_costs_its_sequence_alone(poison: list[Poison], mask: list[bool]) -> None:
    whole = by_sequence(DECISIVE)(poison, mask)
    without_advantage = {position for position, stream, _ in poison if stream == "advantages_T"}
    result = assert_poison_stays(GSPO, poison, mask, whole | without_advantage)
    lost = sum(mask[position] for position in whole | without_advantage)
    assert numbers_of(result.metrics)["policy/non_finite"] == lost
    whole = by_sequence(DECISIVE | {"advantages_T"})(poison, mask)
    result = assert_poison_stays(GMPO, poison, mask, whole)
    assert numbers_of(result.metrics)["policy/non_finite"] == sum(mask[position] for position in whole)


@pytest.mark.parametrize("objective", [GSPO, GMPO], ids=["gspo", "gmpo"])
def test_lengths_must_be_those_of_the_tokens(objective: Objective) -> None:
    streams = replace(random_streams(0, (3, 2)), lengths=(3,))
    with pytest.raises(ValueError, match="the sequences hold 3 tokens, but the streams 5"):
        objective(streams)


def test_a_micro_batch_without_loss_has_a_graph() -> None:
    for objective in (GSPO, GMPO):
        assert gradient_of(objective, streams_of([-1.0], [-2.0], [1.0], [False])).tolist() == [0.0]


def test_sequences() -> None:
    streams = streams_of([-1.0] * 5, [-1.0] * 5, [1.0] * 5, [True, True, False, False, True], lengths=(3, 1, 1))
    sequences = Sequences.of(streams)
    values_T = torch.tensor([1.0, 4.0, math.nan, 9.0, -3.0])
    assert sequences.counts_B.tolist() == [2, 0, 1]
    assert sequences.sums(values_T).tolist() == [5.0, 0.0, -3.0]
    assert sequences.means(values_T).tolist() == [2.5, 2.5, 2.5, 0.0, -3.0]
    assert sequences.largest(values_T).tolist() == [4.0, 4.0, 4.0, 0.0, 0.0]
    assert sequences.all_have(values_T > 0).tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("delta", [1e-4, 0.02, 0.3])
def test_bounds_are_where_the_divergence_is_delta(name: str, delta: float) -> None:
    generator = generator_of(name, 0.7 if name == "alpha" else None)
    low, high = log_ratio_bounds(generator, delta)
    at_T = generator.mc(torch.tensor([low, high], dtype=torch.float64))
    assert low < 0 < high
    assert at_T.tolist() == pytest.approx([delta, delta], rel=1e-6)


def test_bounds_in_closed_form_and_out_of_reach() -> None:
    neyman = generator_of("chi2_neyman")
    assert log_ratio_bounds(neyman, math.cosh(0.4) - 1) == pytest.approx((-0.4, 0.4), rel=1e-12)
    assert log_ratio_bounds(generator_of("tv"), 0.1) == pytest.approx((math.log(0.8), math.log(1.2)), rel=1e-12)
    assert log_ratio_bounds(generator_of("tv"), 0.7)[0] == pytest.approx(-40.0), "f(0) = 1/2 < .7"
    assert log_ratio_bounds(neyman, math.inf) == (-40.0, 40.0)
    assert isinstance(neyman, Generator)


@pytest.mark.parametrize(
    "cell",
    [Cell("kl_fwd", "atomic", 0.1, 0.1), Cell("tv", "mc", 0.1, 0.1, ratio_guard=(0.5, 2.0))],
)
def test_a_geometric_mean_refuses_what_it_cannot_clip(cell: Cell) -> None:
    with pytest.raises(ValueError, match="the geometric mean"):
        GeometricMean(TrustRegion(cell))
