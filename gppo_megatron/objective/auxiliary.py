"""Terms added to an objective: a KL penalty towards a reference policy, and a bonus for entropy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from gppo_megatron.metrics import Sum
from gppo_megatron.objective.policy_gradient import Objective, TokenLoss, TokenStreams
from gppo_megatron.objective.selected import at_least_float32, mean_of, only
from gppo_megatron.objective.sequence import Sequences

KlEstimator = Literal["k1", "k2", "k3", "k1_in_reward"]

LOG_RATIO_LIMIT = 20.0
"""Bound of |log ref - log pi| in k3, whose exponential would overflow."""


@dataclass(frozen=True)
class WithTerms:
    """The sum of `objective` and of the terms, token by token. Their metrics have names of their own."""

    objective: Objective
    terms: tuple[Objective, ...]

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        loss = self.objective(streams)
        loss_T, metrics = loss.loss_T, dict(loss.metrics)
        for term in self.terms:
            added = term(streams)
            loss_T, metrics = loss_T + added.loss_T, metrics | dict(added.metrics)
        return replace(loss, loss_T=loss_T, metrics=metrics)


@dataclass(frozen=True)
class ReferenceKl:
    """coefficient x an estimate of KL(pi || reference), on every loss token. See `KL_LOSSES` for the gradients.

    A loss token with a log-prob that is not finite gets no loss and is counted in `kl/non_finite`; with k1_in_reward
    that is all of its sequence. Raises ValueError where the streams have no reference.
    """

    coefficient: float
    estimator: KlEstimator

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        if streams.reference_logprobs_T is None:
            raise ValueError("a KL penalty needs the reference policy's log-probs, but the streams have none")
        reference_T = at_least_float32(streams.reference_logprobs_T)
        finite_T = streams.logprobs_T.isfinite() & reference_T.isfinite()
        if self.estimator == "k1_in_reward":
            finite_T = Sequences.of(streams).all_have(finite_T)
        valid_T = streams.mask_T & finite_T
        log_pi_T, reference_T = only(valid_T, streams.logprobs_T), only(valid_T, reference_T)
        loss_T = KL_LOSSES[self.estimator](log_pi_T, reference_T, streams)
        return TokenLoss(
            self.coefficient * only(valid_T, loss_T),
            {
                "kl/k1": mean_of(log_pi_T - reference_T, valid_T),
                "kl/k3": mean_of(k3(log_pi_T, reference_T, streams), valid_T),
                "kl/non_finite": Sum((streams.mask_T & ~finite_T).sum().float()),
            },
        )


def k1(log_pi_T: torch.Tensor, reference_T: torch.Tensor, streams: TokenStreams) -> torch.Tensor:
    """log(pi / ref): an unbiased value, negative at times. Its gradient, that of log pi, is 0 in expectation."""
    return log_pi_T - reference_T


def k2(log_pi_T: torch.Tensor, reference_T: torch.Tensor, streams: TokenStreams) -> torch.Tensor:
    """log(pi / ref)^2 / 2: a biased value. Its gradient is that of KL(pi || ref) where the tokens come from pi."""
    return (log_pi_T - reference_T).square() / 2


def k3(log_pi_T: torch.Tensor, reference_T: torch.Tensor, streams: TokenStreams) -> torch.Tensor:
    """ref / pi - 1 - log(ref / pi): an unbiased value, never negative. Its gradient is that of KL(ref || pi)."""
    log_ratio_T = (reference_T - log_pi_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio_T) - log_ratio_T


def k1_in_reward(log_pi_T: torch.Tensor, reference_T: torch.Tensor, streams: TokenStreams) -> torch.Tensor:
    """(sum of k1 over this and the sequence's later tokens, a constant) x log pi.

    That is k1 subtracted from the reward of each token. Unlike the others it also charges a token for where it leads:
    its gradient is that of the KL divergence between whole answers, where they come from pi.
    """
    cost_T = (log_pi_T - reference_T).detach()
    return (cost_T + Sequences.of(streams).later(cost_T)) * log_pi_T


KL_LOSSES: dict[KlEstimator, Callable[[torch.Tensor, torch.Tensor, TokenStreams], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1_in_reward": k1_in_reward,
}
"""(log pi, log ref, streams) -> loss; the log-probs are 0 outside of the valid tokens."""


@dataclass(frozen=True)
class EntropyBonus:
    """loss = -coefficient x entropy of the policy's distribution, on every loss token.

    A token whose entropy is not finite gets none and is counted in `entropy/non_finite`.
    """

    coefficient: float

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        finite_T = streams.entropy_T.isfinite()
        loss_T = -self.coefficient * only(streams.mask_T & finite_T, streams.entropy_T)
        return TokenLoss(loss_T, {"entropy/non_finite": Sum((streams.mask_T & ~finite_T).sum().float())})
