"""Diagnostics by hand, by enumeration, and that they change nothing."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from gppo_megatron.build_objective import diagnosed
from gppo_megatron.config.derived import ResolvedObjective
from gppo_megatron.config.schema import Diagnostics
from gppo_megatron.metrics import Metric
from gppo_megatron.objective.diagnostics import (
    BoundTerms,
    Diagnosed,
    Estimates,
    MaskedShares,
    Measured,
    Probe,
    of_sample,
)
from gppo_megatron.objective.divergences import Generator, generator_of
from gppo_megatron.objective.estimators import ESTIMATORS, token_estimates
from gppo_megatron.objective.policy_gradient import (
    MaximumLikelihood,
    Objective,
    PolicyGradient,
    TokenLoss,
    TokenStreams,
)
from gppo_megatron.objective.presets import DIVERGENCES, PRESETS, TOKEN_ESTIMATORS, Cell
from gppo_megatron.objective.sequence import Sequences
from gppo_megatron.objective.trust_region import TrustRegion
from tests.numeric.streams import (
    MASKS,
    POISONS,
    Poison,
    assert_finite,
    gradient_of,
    numbers_of,
    poisoned,
    random_streams,
    streams_of,
)

KL = generator_of("kl_fwd")
GPPO = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
PROBES: tuple[Probe, ...] = (Estimates(("mc", "atomic", "binary"), (0.01, 0.1)), MaskedShares(), BoundTerms())


def measured(
    probe: Probe, streams: TokenStreams, loss: TokenLoss | None = None, generator: Generator = KL
) -> dict[str, float]:
    return numbers_of(dict(probe(Measured.of(streams, (loss or GPPO(streams)).kept_T, generator))))


def metrics_of(objective: Objective, *micro_batches: TokenStreams) -> Mapping[str, Metric[torch.Tensor]]:
    """What a step of these measures of all tokens together."""
    seen = [loss.seen for loss in map(objective, micro_batches) if loss.seen is not None]
    assert len(seen) == len(micro_batches)
    return seen[0].measure(seen)


def resolved(estimator: str) -> ResolvedObjective:
    cell = Cell("kl_fwd", estimator, 0.025, 0.025)
    return ResolvedObjective("mask", cell, "mean", "token_mean", 8, None, None, "recomputed", (), ())


def test_estimates_by_hand() -> None:
    """chi2: mu = .25, pi = .5 has f(2) = .5, atom .125, rest .75 (1/3)^2 / 2; an unmoved token has 0."""
    streams = streams_of([math.log(0.5), -1.0], [math.log(0.25), -1.0], [1.0, 1.0])
    probe = Estimates(("mc", "atomic", "binary"), (0.1, 0.2))
    rest = 0.75 * (1 / 3) ** 2 / 2
    assert measured(probe, streams, generator=generator_of("chi2_pearson")) == pytest.approx(
        {
            "estimate/mc": 0.25,
            "estimate/mc_max": 0.5,
            "estimate/mc_above_0.1": 0.5,
            "estimate/mc_above_0.2": 0.5,
            "estimate/atomic": 0.125 / 2,
            "estimate/atomic_max": 0.125,
            "estimate/atomic_above_0.1": 0.5,
            "estimate/atomic_above_0.2": 0.0,
            "estimate/binary": (0.125 + rest) / 2,
            "estimate/binary_max": 0.125 + rest,
            "estimate/binary_above_0.1": 0.5,
            "estimate/binary_above_0.2": 0.0,
        }
    )


def test_all_estimates_at_once_are_those_one_by_one() -> None:
    streams = random_streams(1, (50,), spread=1.0)
    for name, alpha in [*((name, None) for name in DIVERGENCES if name != "alpha"), ("alpha", 0.3)]:
        generator = generator_of(name, alpha)
        pair = streams.logprobs_T.detach(), streams.anchor_logprobs_T
        together = token_estimates(generator, *pair)
        expected = [ESTIMATORS[estimator](generator, *pair) for estimator in TOKEN_ESTIMATORS]
        torch.testing.assert_close(torch.stack(together), torch.stack(expected), rtol=1e-13, atol=0)


def test_estimates_of_the_head_are_of_the_tokens_that_have_one() -> None:
    """Three of five: .03 and .3 are numbers, and one is infinite, which is in the tail and in no mean."""
    streams = streams_of([-1.0] * 6, [-1.1] * 6, [1.0] * 6, [True] * 5 + [False])
    exact_T = torch.tensor([0.03, math.nan, 0.3, math.inf, math.nan, 7.0], dtype=torch.float64)
    numbers = measured(Estimates((), (0.1, 0.01), (("exact", of_sample),)), replace(streams, exact_T=exact_T))
    assert numbers == pytest.approx(
        {
            "estimate/exact": 0.33 / 2,
            "estimate/exact_max": 0.3,
            "estimate/exact_above_0.1": 2 / 3,
            "estimate/exact_above_0.01": 1.0,
        }
    )
    with pytest.raises(ValueError, match="no exact divergence"):
        measured(Estimates((), (), (("exact", of_sample),)), streams)


def test_masked_shares_by_hand() -> None:
    """The lower edge of a band is in it; only a token's own sign and band count it."""
    mu = [0.005, 0.01, 0.3, 0.3, 0.9, 0.95, 0.3]
    streams = streams_of([-1.0] * 7, [math.log(p) for p in mu], [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 0.0])
    streams = replace(streams, anchor_logprobs_T=torch.log(torch.tensor(mu, dtype=torch.float64)))
    kept_T = torch.tensor([False, True, False, True, True, False, False])
    numbers = measured(MaskedShares(), streams, replace(GPPO(streams), kept_T=kept_T))
    assert {name: value for name, value in numbers.items() if not math.isnan(value)} == {
        "masked/positive_mu_0_to_0.01": 1.0,
        "masked/positive_mu_0.01_to_0.1": 0.0,
        "masked/positive_mu_0.1_to_0.5": 0.5,
        "masked/negative_mu_0.9_to_1": 0.5,
    }
    assert len(numbers) == 10
    assert measured(MaskedShares(), streams, MaximumLikelihood()(streams)) == {}


def test_bound_terms_by_hand() -> None:
    """Ratios 2 and 1/2 with A = 1, and 3 with A = -2: gains 1, -1/2 and -4."""
    logs = [math.log(2), math.log(0.5), math.log(3)]
    streams = streams_of([-3.0 + log for log in logs], [-3.0] * 3, [1.0, 1.0, -2.0], lengths=(2, 1))
    numbers = measured(BoundTerms(), streams)
    assert numbers["bound/surrogate"] == pytest.approx((1 - 0.5 - 4) / 2)
    assert numbers["bound/remainder"] == pytest.approx((1 - 0.5) / 2), "the first token's is 1 x (1 - 1/2)"
    assert numbers["bound/divergence"] == pytest.approx(sum(math.exp(log) - 1 - log for log in logs) / 2)
    assert (numbers["bound/advantage_max"], numbers["bound/length_max"]) == (2.0, 2.0)


def test_bound_terms_are_the_improvement_and_stay_within_the_bound() -> None:
    """All answers of three tokens out of two under two policies, weighed by mu: L - Delta is J(pi) - J(mu)."""
    random = torch.Generator().manual_seed(1)
    answers = list(itertools.product(range(2), repeat=3))
    histories = [answer[:place] for place in range(3) for answer in answers if not any(answer[place:])]
    pi, mu = (
        torch.log_softmax(torch.randn(len(histories), 2, generator=random, dtype=torch.float64), 1) for _ in range(2)
    )
    rows = torch.tensor([[histories.index(answer[:place]) for place in range(3)] for answer in answers])
    log_pi_AL, log_mu_AL = (table[rows, torch.tensor(answers)] for table in (pi, mu))
    reward_A = torch.rand(len(answers), generator=random, dtype=torch.float64)
    surrogate = remainder = 0.0
    for log_pi_L, log_mu_L, reward in zip(log_pi_AL, log_mu_AL, reward_A, strict=True):
        numbers = measured(BoundTerms(), streams_of(log_pi_L, log_mu_L, reward.expand(3)))
        surrogate += float(log_mu_L.sum().exp()) * numbers["bound/surrogate"]
        remainder += float(log_mu_L.sum().exp()) * numbers["bound/remainder"]
    improvement = float(((log_pi_AL.sum(1).exp() - log_mu_AL.sum(1).exp()) * reward_A).sum())
    assert surrogate - remainder == pytest.approx(improvement, rel=1e-12)
    largest = float((mu.exp() * (mu - pi)).sum(1).max())
    assert abs(remainder) <= float(reward_A.max()) * 3 * 2 * largest


def test_mc_and_bound_are_left_out_of_nothing_by_a_masked_token() -> None:
    streams = streams_of([-1.0, -1.0, -9.0], [-1.5, -1.0, -1.0], [1.0, 1.0, 1.0], [True, True, False], lengths=(3,))
    numbers = measured(BoundTerms(), streams)
    assert numbers["bound/length_max"] == 2.0
    assert numbers["bound/remainder"] == 0.0, "only the last loss token moved, and nothing follows it"


def test_later() -> None:
    streams = streams_of([-1.0] * 5, [-1.0] * 5, [1.0] * 5, [True, False, True, True, True], lengths=(3, 2))
    values_T = torch.tensor([1.0, math.nan, 4.0, 8.0, 16.0], dtype=torch.float64)
    assert Sequences.of(streams).later(values_T).tolist() == [4.0, 4.0, 0.0, 16.0, 0.0]


@pytest.mark.parametrize("estimator", ["atomic", "exact"])
def test_disagreement(estimator: str) -> None:
    """At .025, D above what the estimates see: they part where D masks an outward move. Of a sample, by its tokens."""
    streams = random_streams(4, (400,), spread=0.5, masked=0.1)
    log_pi_T, log_mu_T = streams.logprobs_T.detach(), streams.anchor_logprobs_T
    atomic_T = ESTIMATORS["atomic"](KL, log_pi_T, log_mu_T)
    exact_T = atomic_T + 0.02 * torch.rand(400, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    known_T = torch.ones(400, dtype=torch.bool)
    if estimator == "exact":
        streams = replace(streams, divergence_T=exact_T)
    else:
        known_T[::3] = False
        streams = replace(streams, exact_T=exact_T.masked_fill(~known_T, torch.nan))
    outward_T = (streams.advantages_T > 0) == (log_pi_T > log_mu_T)
    part_T = outward_T & (atomic_T <= 0.025) & (exact_T > 0.025)
    expected = float(part_T[streams.mask_T & known_T].double().mean())
    assert 0.02 < expected < 0.5
    given = Diagnostics(("atomic", "binary"), masked=False, bound=False, exact_sample=int(estimator != "exact"))
    numbers = numbers_of(
        dict(metrics_of(diagnosed(lambda s: TokenLoss(s.logprobs_T, {}), resolved(estimator), given), streams))
    )
    assert numbers["decision/differs_atomic"] == pytest.approx(expected)
    assert numbers["estimate/exact"] == pytest.approx(float(exact_T[streams.mask_T & known_T].mean()))
    assert {name for name in numbers if name.startswith("decision")} == {
        "decision/differs_atomic",
        "decision/differs_binary",
    }


def test_no_comparison_where_the_exact_divergence_is_not_worked_out() -> None:
    streams = random_streams(4, (9,))
    numbers = metrics_of(diagnosed(GPPO, resolved("atomic"), Diagnostics()), streams)
    assert not any(name.startswith("decision") or "exact" in name for name in numbers)
    with_top = replace(streams, divergence_T=streams.logprobs_T.detach() * 0)
    topk = metrics_of(diagnosed(GPPO, resolved("topk"), Diagnostics()), with_top)
    assert float(topk["estimate/topk"].value) == 0
    assert not any(name.startswith("decision") for name in topk)


def test_a_head_that_was_not_asked_is_an_error() -> None:
    with pytest.raises(ValueError, match="no exact divergence"):
        metrics_of(diagnosed(GPPO, resolved("atomic"), Diagnostics(exact_sample=1)), random_streams(4, (9,)))


def test_diagnostics_change_neither_loss_nor_gradient() -> None:
    streams = random_streams(9, (5, 7))
    diagnosed, plain = Diagnosed(GPPO, KL, PROBES)(streams), GPPO(streams)
    assert torch.equal(diagnosed.loss_T, plain.loss_T)
    assert torch.equal(gradient_of(Diagnosed(GPPO, KL, PROBES), streams), gradient_of(GPPO, streams))
    assert set(plain.metrics) == set(diagnosed.metrics)
    measured_too = metrics_of(Diagnosed(GPPO, KL, PROBES), streams)
    assert measured_too
    assert not set(plain.metrics) & set(measured_too)
    assert not any(value.requires_grad for metric in measured_too.values() for value in vars(metric).values())


def test_micro_batches_are_measured_together() -> None:
    """Their tokens one after the other, and their sequences, with what the head worked out of some tokens."""
    whole = random_streams(3, (4, 3, 5), spread=0.5)
    whole = replace(whole, exact_T=torch.where(torch.arange(12) % 3 == 1, whole.logprobs_T.detach().abs(), torch.nan))
    parts = []
    for place, rows in ((slice(0, 4), (4,)), (slice(4, 12), (3, 5))):
        tensors = {name: value[place] for name, value in vars(whole).items() if isinstance(value, torch.Tensor)}
        parts.append(replace(whole, **tensors, lengths=rows))
    objective = diagnosed(GPPO, resolved("atomic"), Diagnostics(exact_sample=1))
    together, apart = (numbers_of(dict(metrics_of(objective, *given))) for given in ((whole,), parts))
    assert apart == pytest.approx(together, nan_ok=True, rel=1e-12)
    first = numbers_of(dict(metrics_of(objective, parts[0])))
    assert first != pytest.approx(together, nan_ok=True, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(POISONS, MASKS)
def test_values_that_are_not_finite_never_leak(poison: list[Poison], mask: list[bool]) -> None:
    _, ill = poisoned(poison, mask)
    assert_finite(replace(GPPO(ill), metrics=metrics_of(Diagnosed(GPPO, KL, PROBES), ill)))
