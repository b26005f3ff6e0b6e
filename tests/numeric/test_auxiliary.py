"""KL to a reference: values, and the gradient each estimator really has, over all answers of a small language."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from gppo_megatron.objective.auxiliary import KL_LOSSES, EntropyBonus, KlEstimator, ReferenceKl, WithTerms
from gppo_megatron.objective.policy_gradient import PolicyGradient, TokenStreams
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from tests.numeric.streams import (
    MASKS,
    POISONS,
    Poison,
    by_sequence,
    gradient_of,
    numbers_of,
    poisoned,
    random_streams,
    streams_of,
    token_by_token,
)

GPPO = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))


def with_reference(streams: TokenStreams, reference: list[float] | torch.Tensor) -> TokenStreams:
    return replace(streams, reference_logprobs_T=torch.as_tensor(reference, dtype=streams.logprobs_T.dtype))


def test_values_and_gradients_by_hand() -> None:
    """pi = .5, ref = .25 and pi = .2, ref = .4: log-ratios of log 2 and -log 2."""
    log2 = math.log(2)
    streams = with_reference(
        streams_of([math.log(0.5), math.log(0.2)], [-1.0, -1.0], [1.0, 1.0]), [math.log(0.25), math.log(0.4)]
    )
    values: dict[KlEstimator, list[float]] = {
        "k1": [log2, -log2],
        "k2": [log2**2 / 2, log2**2 / 2],
        "k3": [0.5 - 1 + log2, 2 - 1 - log2],
    }
    slopes: dict[KlEstimator, list[float]] = {
        "k1": [1.0, 1.0],
        "k2": [log2, -log2],
        "k3": [1 - 0.5, 1 - 2],
        "k1_in_reward": [0.0, -log2],
    }
    for estimator, value in values.items():
        assert ReferenceKl(0.5, estimator)(streams).loss_T.tolist() == pytest.approx([0.5 * v for v in value])
    for estimator, slope in slopes.items():
        gradient_T = gradient_of(ReferenceKl(0.5, estimator), streams)
        assert gradient_T.tolist() == pytest.approx([0.5 * s for s in slope], abs=1e-15)
    numbers = numbers_of(ReferenceKl(0.5, "k2")(streams).metrics)
    assert numbers["kl/k1"] == pytest.approx(0.0, abs=1e-15)
    assert numbers["kl/k3"] == pytest.approx(sum(values["k3"]) / 2)


VOCABULARY, LENGTH = 3, 3
HISTORIES = [history for length in range(LENGTH) for history in itertools.product(range(VOCABULARY), repeat=length)]
ANSWERS = list(itertools.product(range(VOCABULARY), repeat=LENGTH))


class Language:
    """Every answer of three tokens out of three; the next token's logits depend on all before it."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(5)
        shape = (len(HISTORIES), VOCABULARY)
        self.logits = torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()
        self.reference = torch.randn(shape, generator=random, dtype=torch.float64)

    def of_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """[answers x tokens]: the log-prob of each token."""
        table = torch.log_softmax(logits, 1)
        rows = [[HISTORIES.index(answer[:place]) for place in range(LENGTH)] for answer in ANSWERS]
        return table[torch.tensor(rows), torch.tensor(ANSWERS)]

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(value, self.logits)
        return gradient

    def expected_loss_gradient(self, estimator: KlEstimator) -> torch.Tensor:
        """Of the loss summed over an answer's tokens, where the answers are drawn from the policy itself."""
        log_pi_AL, log_ref_AL = self.of_tokens(self.logits), self.of_tokens(self.reference)
        streams = streams_of(log_pi_AL.flatten(), log_pi_AL.flatten().detach(), torch.zeros(log_pi_AL.numel()))
        streams = replace(streams, logprobs_T=log_pi_AL.flatten(), lengths=(LENGTH,) * len(ANSWERS))
        loss_T = ReferenceKl(1.0, estimator)(with_reference(streams, log_ref_AL.flatten())).loss_T
        chances_A = log_pi_AL.sum(1).exp().detach()
        return self.gradient((chances_A * loss_T.view(-1, LENGTH).sum(1)).sum())

    def token_divergences(self, forward: bool) -> torch.Tensor:
        """E over the policy's own histories, held constant, of sum_t KL(pi || ref), or of KL(ref || pi)."""
        log_pi, log_ref = torch.log_softmax(self.logits, 1), torch.log_softmax(self.reference, 1)
        first, second = (log_ref, log_pi) if forward else (log_pi, log_ref)
        divergence = (first.exp() * (first - second)).sum(1)
        log_pi_AL = self.of_tokens(self.logits).detach()
        chances = torch.stack([self.chance_of(history, log_pi_AL) for history in HISTORIES])
        return (chances * divergence).sum()

    def chance_of(self, history: tuple[int, ...], log_pi_AL: torch.Tensor) -> torch.Tensor:
        inside = torch.tensor([answer[: len(history)] == history for answer in ANSWERS])
        return log_pi_AL.sum(1).exp()[inside].sum()

    def answer_divergence(self) -> torch.Tensor:
        """KL(pi || ref) between whole answers."""
        log_pi_A, log_ref_A = self.of_tokens(self.logits).sum(1), self.of_tokens(self.reference).sum(1)
        return (log_pi_A.exp() * (log_pi_A - log_ref_A)).sum()


def test_the_gradient_of_k1_as_a_loss_is_zero_in_expectation() -> None:
    language = Language()
    gradient = language.expected_loss_gradient("k1")
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-15)


def test_k2_follows_the_divergence_from_the_reference_token_by_token() -> None:
    language = Language()
    expected = language.gradient(language.token_divergences(forward=False))
    torch.testing.assert_close(language.expected_loss_gradient("k2"), expected, rtol=1e-12, atol=1e-15)


def test_k3_follows_the_other_direction() -> None:
    language = Language()
    expected = language.gradient(language.token_divergences(forward=True))
    torch.testing.assert_close(language.expected_loss_gradient("k3"), expected, rtol=1e-12, atol=1e-15)
    other = language.gradient(language.token_divergences(forward=False))
    assert (expected - other).abs().max() > 0.01, "the two directions differ here"


def test_k1_in_the_reward_follows_the_divergence_of_whole_answers() -> None:
    language = Language()
    expected = language.gradient(language.answer_divergence())
    torch.testing.assert_close(language.expected_loss_gradient("k1_in_reward"), expected, rtol=1e-12, atol=1e-15)
    assert (expected - language.expected_loss_gradient("k2")).abs().max() > 0.01, "k2 does not see where tokens lead"


def test_the_reward_form_stays_within_its_sequence_and_its_loss_tokens() -> None:
    streams = with_reference(
        streams_of([-1.0] * 5, [-1.0] * 5, [1.0] * 5, [True, False, True, True, True], lengths=(3, 2)),
        [-1.5, 7.0, -2.0, -1.25, -0.5],
    )
    assert gradient_of(ReferenceKl(1.0, "k1_in_reward"), streams).tolist() == [1.5, 0.0, 1.0, -0.25, -0.5]


def test_terms_add_up() -> None:
    streams = with_reference(random_streams(1, (5, 4)), torch.linspace(-3, -0.1, 9, dtype=torch.float64))
    terms = (ReferenceKl(0.3, "k3"), EntropyBonus(0.01))
    whole = WithTerms(GPPO, terms)
    summed_T = gradient_of(GPPO, streams) + sum(gradient_of(term, streams) for term in terms)
    torch.testing.assert_close(gradient_of(whole, streams), summed_T)
    numbers = numbers_of(whole(streams).metrics)
    assert {"kept/positive", "kl/k3", "entropy/non_finite"} <= set(numbers)


def test_an_entropy_bonus_raises_the_entropy() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, 1)
    entropy_T = -(log_probs.exp() * log_probs).sum(1)
    streams = replace(streams_of([-1.0], [-1.0], [1.0]), entropy_T=entropy_T)
    (gradient,) = torch.autograd.grad(EntropyBonus(0.5)(streams).loss_T.sum(), logits, retain_graph=True)
    (of_entropy,) = torch.autograd.grad(entropy_T.sum(), logits)
    torch.testing.assert_close(gradient, -0.5 * of_entropy)


@settings(max_examples=60, deadline=None)
@given(POISONS, MASKS)
def test_values_that_are_not_finite_never_leak(poison: list[Poison], mask: list[bool]) -> None:
    """The sampler's stream of the poison stands for the reference's."""
    clean, ill = poisoned(poison, mask)
    for estimator in KL_LOSSES:
        rule = by_sequence if estimator == "k1_in_reward" else token_by_token
        lost = rule({"logprobs_T", "sampler_logprobs_T"})(poison, mask)
        penalty = ReferenceKl(0.1, estimator)
        sound_T = torch.tensor([position not in lost for position in range(6)])
        want_T = gradient_of(penalty, replace(clean, reference_logprobs_T=clean.sampler_logprobs_T))
        result_T = gradient_of(penalty, replace(ill, reference_logprobs_T=ill.sampler_logprobs_T))
        assert torch.equal(result_T, torch.where(sound_T, want_T, 0.0))
        metrics = numbers_of(penalty(replace(ill, reference_logprobs_T=ill.sampler_logprobs_T)).metrics)
        assert metrics["kl/non_finite"] == sum(mask[position] for position in lost)


@settings(max_examples=30, deadline=None)
@given(POISONS, MASKS)
def test_an_entropy_that_is_not_finite_costs_its_own_token(poison: list[Poison], mask: list[bool]) -> None:
    _, ill = poisoned(poison, mask)
    lost = {position for position, stream, _ in poison if stream == "entropy_T"}
    loss = EntropyBonus(0.5)(ill)
    want = [-0.5 * float(ill.entropy_T[p]) if mask[p] and p not in lost else 0.0 for p in range(6)]
    assert loss.loss_T.tolist() == pytest.approx(want)
    assert numbers_of(loss.metrics)["entropy/non_finite"] == sum(mask[position] for position in lost)


def test_terms_leave_the_surrogates_own_decisions_alone() -> None:
    whole = WithTerms(GPPO, (EntropyBonus(0.1),))
    streams = random_streams(2, (6,), spread=1.0)
    kept_T = whole(streams).kept_T
    assert kept_T is not None
    assert torch.equal(kept_T, GPPO(streams).kept_T)


def test_a_penalty_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the reference policy's log-probs"):
        ReferenceKl(0.1, "k2")(random_streams(0, (3,)))
