"""Group advantages against verl's estimators, in float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from gppo_megatron.objective.advantages import ADVANTAGES, Rewards
from gppo_megatron.objective.presets import Advantage

Groups = list[Rewards]


def scored(rewards: Rewards) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def verl_advantages(groups: Groups, estimator: str, **options: bool) -> list[list[float]]:
    """verl's advantages of the scored members, a list a group; all groups in one call, their members interleaved."""
    members = [(group, reward) for group, rewards in enumerate(groups) for reward in scored(rewards)]
    order = torch.randperm(len(members), generator=torch.Generator().manual_seed(len(members))).tolist()
    rewards_BL = torch.zeros(len(members), 3, dtype=torch.float64)
    rewards_BL[:, 2] = torch.tensor([members[place][1] for place in order], dtype=torch.float64)
    names = np.array([f"prompt {members[place][0]}" for place in order], dtype=object)
    mask_BL = torch.ones_like(rewards_BL)
    advantages_BL, _ = get_adv_estimator_fn(estimator)(rewards_BL, mask_BL, index=names, **options)
    of_member = dict(zip(order, advantages_BL[:, 0].tolist(), strict=True))
    per_group: list[list[float]] = [[] for _ in groups]
    for place, (group, _) in enumerate(members):
        per_group[group].append(of_member[place])
    return per_group


ESTIMATORS: dict[Advantage, Callable[[Groups], list[list[float]]]] = {
    "mean": lambda groups: verl_advantages(groups, "grpo", norm_adv_by_std_in_grpo=False),
    "mean_std": lambda groups: verl_advantages(groups, "grpo", norm_adv_by_std_in_grpo=True),
    "leave_one_out": lambda groups: verl_advantages(groups, "rloo"),
}


def random_groups(seed: int) -> Groups:
    """Right or wrong, graded, negative, partly without a score, nearly equal; two scored members at least."""
    random = np.random.default_rng(seed)
    groups: Groups = [(1.0, 0.0), (0.0, None, 1.0), (0.25, 0.25 + 1e-9, None, 0.25)]
    for size in (2, 3, 4, 8, 16, 64):
        groups.append((0.0, 1.0, *(float(value) for value in random.integers(2, size=size - 2))))
        groups.append(tuple(float(value) for value in random.uniform(-3, 3, size)))
        groups.append((0.5, -0.5, *(None if value < 0.3 else float(value) for value in random.random(size))))
    return groups


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(name: Advantage, seed: int) -> None:
    groups = random_groups(seed)
    for rewards, theirs in zip(groups, ESTIMATORS[name](groups), strict=True):
        ours = ADVANTAGES[name](rewards)
        # Rounding of rewards of a few units; where nearly equal, divided by as little as 1e-6.
        np.testing.assert_allclose(scored(ours), theirs, rtol=1e-12, atol=1e-9 if name == "mean_std" else 1e-14)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -2.7])
def test_equal_rewards_are_no_signal(name: Advantage, reward: float) -> None:
    """verl leaves what rounding leaves, this project exactly nothing."""
    groups: Groups = [(reward,) * size for size in (2, 3, 7, 10)]
    for rewards, theirs in zip(groups, ESTIMATORS[name](groups), strict=True):
        assert ADVANTAGES[name](rewards) == (0.0,) * len(rewards)
        np.testing.assert_allclose(theirs, 0.0, atol=1e-9)


@pytest.mark.parametrize("name", ["mean", "leave_one_out"])
def test_known_difference_of_a_single_member(name: Advantage) -> None:
    """Without anything to compare with, verl trains on the bare reward, this project on nothing."""
    assert ESTIMATORS[name]([(0.7, None)]) == [[0.7]]
    assert ADVANTAGES[name]((0.7, None)) == (0.0, None)
