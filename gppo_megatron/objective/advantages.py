"""Rewards of a group -> advantages of its members.

A member without a reward (None) has no advantage either, and no part in the baseline. A group with fewer than two
scored members, or with equal rewards, teaches nothing: each scored member gets exactly 0.
"""

from collections.abc import Callable
from statistics import fmean, stdev

from gppo_megatron.objective.presets import Advantage

Rewards = tuple[float | None, ...]

STD_EPSILON = 1e-6


def mean(rewards: Rewards) -> Rewards:
    """R - mean(R)."""
    return _over_scored(rewards, _centred)


def mean_std(rewards: Rewards) -> Rewards:
    """(R - mean(R)) / (std(R) + 1e-6), with the sample standard deviation (divisor n - 1).

    verl and TRL normalise by the same standard deviation; verl adds 1e-6 to it, TRL 1e-4.
    """
    return _over_scored(rewards, _standardised)


def leave_one_out(rewards: Rewards) -> Rewards:
    """R minus the mean of the other members' rewards."""
    return _over_scored(rewards, _against_the_others)


ADVANTAGES: dict[Advantage, Callable[[Rewards], Rewards]] = {
    "mean": mean,
    "mean_std": mean_std,
    "leave_one_out": leave_one_out,
}


def _over_scored(rewards: Rewards, rule: Callable[[list[float]], list[float]]) -> Rewards:
    """Apply `rule` to the rewards that exist. Equality is exact: rounding must not make a signal of equal rewards."""
    scored = [reward for reward in rewards if reward is not None]
    informative = len(set(scored)) > 1
    advantages = iter(rule(scored) if informative else [0.0] * len(scored))
    return tuple(None if reward is None else next(advantages) for reward in rewards)


def _centred(scored: list[float]) -> list[float]:
    baseline = fmean(scored)
    return [reward - baseline for reward in scored]


def _standardised(scored: list[float]) -> list[float]:
    scale = stdev(scored) + STD_EPSILON
    return [advantage / scale for advantage in _centred(scored)]


def _against_the_others(scored: list[float]) -> list[float]:
    # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1)
    return [advantage * len(scored) / (len(scored) - 1) for advantage in _centred(scored)]
