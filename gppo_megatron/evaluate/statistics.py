"""avg@k and pass@k with confidence intervals, from answers whose number was fixed when they were asked for."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NORMAL_95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A share in [0, 1] and its 95 % confidence interval over problems.

    lowest, highest: the share if every answer without a verdict were wrong, or right; `value` is `lowest`.
    """

    value: float
    interval: tuple[float, float]
    lowest: float
    highest: float


def average(scores: Sequence[Sequence[float | None]]) -> Estimate:
    """avg@k: the mean over problems of the mean over their k answers. Raises ValueError for no problem or no answer."""
    return _estimate(scores, lambda filled: sum(filled) / len(filled))


def pass_at(k: int, scores: Sequence[Sequence[float | None]]) -> Estimate:
    """pass@k: the chance that at least one of k answers is right (scores 1), unbiased from n >= k answers a problem.

    1 - C(n - c, k) / C(n, k) with c right answers, averaged over problems (arXiv 2107.03374, eq. 1).
    Raises ValueError where a problem has fewer than k answers.
    """
    if any(len(of_problem) < k for of_problem in scores) or k < 1:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} answers to each problem")
    return _estimate(scores, lambda filled: pass_chance(len(filled), sum(score == 1 for score in filled), k))


def pass_chance(answers: int, right: int, k: int) -> float:
    """The chance that a draw of k of `answers`, without replacement, holds one of the `right` ones."""
    return 1 - math.comb(answers - right, k) / math.comb(answers, k)


def _estimate(scores: Sequence[Sequence[float | None]], of_problem: Callable[[Sequence[float]], float]) -> Estimate:
    if not scores or not all(scores):
        raise ValueError("there must be at least one problem, and an answer to each")
    low, high = (
        [of_problem([unknown if score is None else score for score in answers]) for answers in scores]
        for unknown in (0.0, 1.0)
    )
    lowest, highest = (math.fsum(values) / len(values) for values in (low, high))
    return Estimate(lowest, wilson(low), lowest, highest)


def wilson(values: Sequence[float]) -> tuple[float, float]:
    """95 % Wilson score interval of the mean of per-problem values in [0, 1].

    Several answers to one problem are not independent, so the problems are what is counted: the interval is that of as
    many coin flips as would have the values' own standard error, and of one a problem where all values are equal.
    """
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(count - 1, 1)
    flips = count * mean * (1 - mean) / variance if variance > 0 else count
    square = NORMAL_95**2 / flips
    centre = (mean + square / 2) / (1 + square)
    half = math.sqrt(square * (mean * (1 - mean) + square / 4)) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)
