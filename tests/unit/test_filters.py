"""Which groups are left out, and what an answer at the token limit costs."""

import numpy as np
import pytest
from gppo_verifiers.types import Status, Task, Verdict

from gppo_megatron.rollout.filters import (
    GroupFilter,
    MeanScore,
    NoSignal,
    Sieve,
    SoftPenalty,
    Unfinished,
    masked,
    silenced,
)
from gppo_megatron.types import Group, Prompt, Trajectory

PROMPT = Prompt("p", (2, 3), Task("none"))


def answer(score: float | None, length: int = 3, finish: str = "stop") -> Trajectory:
    """`length` tokens after the prompt's two."""
    verdict = Verdict(score, Status.TIMEOUT if score is None else Status.GRADED)
    total = 2 + length
    return Trajectory(
        np.arange(total), np.zeros(total, np.float32), np.arange(total) >= 2, np.full(total, 1), finish, verdict
    )


def group(*scores: float | None, finish: str = "stop") -> Group:
    return Group(PROMPT, tuple(answer(score, finish=finish) for score in scores))


@pytest.mark.parametrize(
    ("scores", "dropped"),
    [((1.0, 0.0), False), ((0.5, 0.5), True), ((None, 1.0), True), ((None, None), True), ((None, 1.0, 0.5), False)],
)
def test_a_group_without_signal_is_one_whose_advantages_are_all_0(
    scores: tuple[float | None, ...], dropped: bool
) -> None:
    assert NoSignal().drops(group(*scores)) == dropped


def test_different_rewards_of_answers_without_loss_are_no_signal() -> None:
    sieve = Sieve(masked, (NoSignal(),))
    cut = sieve.treated(group(1.0, 0.0, finish="length"))
    assert sieve.reason(cut) == "no_signal"
    mixed = Group(PROMPT, (answer(1.0), answer(0.0, finish="length")))
    treated = sieve.treated(mixed)
    assert sieve.reason(treated) is None
    assert treated.rewards == (1.0, 0.0), "a masked answer stays in the baseline"
    assert [int(each.trainable.sum()) for each in treated.trajectories] == [3, 0]


def test_a_penalty_of_its_own_is_a_signal() -> None:
    sieve = Sieve(SoftPenalty(longest=6, buffer=4, weight=1.0), (NoSignal(),))
    assert sieve.reason(sieve.treated(Group(PROMPT, (answer(1.0, 3), answer(1.0, 5))))) is None
    assert sieve.reason(sieve.treated(Group(PROMPT, (answer(1.0, 1), answer(1.0, 2))))) == "no_signal"


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (12, 0.0), (13, 0.125), (14, 0.25), (16, 0.5), (20, 1.0)])
def test_the_soft_penalty_is_dapos_equation_13(length: int, penalty: float) -> None:
    """R = ((L_max - L_cache) - n) / L_cache between L_max - L_cache = 12 and L_max = 20."""
    treated = SoftPenalty(longest=20, buffer=8, weight=1.0)(answer(1.0, length))
    assert treated.penalty == penalty
    assert Group(PROMPT, (treated, answer(None))).rewards == (1.0 - penalty, None)
    assert SoftPenalty(longest=20, buffer=8, weight=0.5)(answer(1.0, length)).penalty == penalty / 2


@pytest.mark.parametrize(
    ("each", "scores", "dropped"),
    [
        (MeanScore(0.25, 0.75), (0.0, 0.5), False),
        (MeanScore(0.25, 0.75), (0.0, 0.25), True),
        (MeanScore(0.25, 0.75), (1.0, 1.0, None), True),
        (MeanScore(0.0, 1.0), (None, None), True),
        (Unfinished(0.5), (0.0, 1.0), False),
    ],
)
def test_scores_outside_a_band_are_dropped(each: GroupFilter, scores: tuple[float | None, ...], dropped: bool) -> None:
    assert each.drops(group(*scores)) == dropped


@pytest.mark.parametrize(("cut", "dropped"), [(0, False), (2, False), (3, True)])
def test_groups_with_too_many_cut_answers_are_dropped(cut: int, dropped: bool) -> None:
    trajectories = [answer(1.0, finish="length" if place < cut else "stop") for place in range(4)]
    assert Unfinished(0.5).drops(Group(PROMPT, tuple(trajectories))) == dropped


def test_the_first_filter_that_drops_gives_the_reason() -> None:
    sieve = Sieve(filters=(Unfinished(0.5), NoSignal()))
    assert sieve.reason(group(1.0, 1.0)) == "no_signal"
    assert sieve.reason(group(1.0, 1.0, finish="length")) == "unfinished"
    assert sieve.reason(group(1.0, 0.0)) is None


def test_a_silenced_group_has_its_answers_and_no_loss() -> None:
    silent = silenced(group(1.0, 0.0))
    assert len(silent.trajectories) == 2
    assert not any(each.trainable.any() for each in silent.trajectories)
    assert [len(each.token_ids) for each in silent.trajectories] == [1, 1]
