import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gppo_megatron.objective.advantages import ADVANTAGES, leave_one_out, mean, mean_std
from gppo_megatron.objective.presets import Advantage

scores = st.lists(st.none() | st.floats(0, 1), max_size=9).map(tuple)


def test_table_holds_the_configurable_names() -> None:
    assert tuple(ADVANTAGES) == get_args(Advantage)


def test_values_by_hand() -> None:
    """Mean 1/4, sample standard deviation 1/2."""
    rewards = (1.0, 0.0, None, 0.0, 0.0)
    assert mean(rewards) == (0.75, -0.25, None, -0.25, -0.25)
    assert mean_std(rewards) == (0.75 / 0.500001, -0.25 / 0.500001, None, -0.25 / 0.500001, -0.25 / 0.500001)
    others = leave_one_out(rewards)
    assert others[0] == pytest.approx(1.0)
    assert others[1] == pytest.approx(-1 / 3)
    assert others[2] is None


@given(scores)
def test_leave_one_out_by_definition(rewards: tuple[float | None, ...]) -> None:
    scored = [reward for reward in rewards if reward is not None]
    got = [value for value in leave_one_out(rewards) if value is not None]
    for index, (reward, advantage) in enumerate(zip(scored, got, strict=True)):
        others = scored[:index] + scored[index + 1 :]
        want = reward - math.fsum(others) / len(others) if others else 0.0
        assert advantage == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(rewards=scores)
def test_a_failure_stays_a_failure_and_changes_nothing(name: str, rewards: tuple[float | None, ...]) -> None:
    got = ADVANTAGES[name](rewards)
    assert [value is None for value in got] == [reward is None for reward in rewards]
    without = ADVANTAGES[name](tuple(reward for reward in rewards if reward is not None))
    assert tuple(value for value in got if value is not None) == without
    assert math.fsum(without) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(reward=st.floats(0, 1), count=st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(name: str, reward: float, count: int) -> None:
    assert ADVANTAGES[name]((None, *[reward] * count)) == (None, *[0.0] * count)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_without_a_comparison(name: str) -> None:
    assert ADVANTAGES[name](()) == ()
    assert ADVANTAGES[name]((None, None)) == (None, None)
    assert ADVANTAGES[name]((None, 0.7)) == (None, 0.0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_better_answer_has_the_larger_advantage(name: str) -> None:
    good, bad = ADVANTAGES[name]((1.0, 0.0))
    assert good is not None
    assert bad is not None
    assert good > 0 > bad
