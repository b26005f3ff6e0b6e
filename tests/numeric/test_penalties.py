"""Soft penalties: gradients against the papers' losses by autograd, and coefficients by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

from gppo_megatron.objective.divergences import GENERATORS
from gppo_megatron.objective.penalties import PenalizedGradient
from gppo_megatron.objective.presets import PRESETS, Cell
from tests.numeric.streams import (
    MASKS,
    POISONS,
    Poison,
    assert_poison_stays,
    gradient_of,
    numbers_of,
    random_streams,
    streams_of,
    token_by_token,
)

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def spo(ratio_T: torch.Tensor, advantages_T: torch.Tensor, mu_T: torch.Tensor) -> torch.Tensor:
    """arXiv 2401.16025 with eps = .2."""
    return ratio_T * advantages_T - advantages_T.abs() / (2 * 0.2) * (ratio_T - 1) ** 2


def drpo(ratio_T: torch.Tensor, advantages_T: torch.Tensor, mu_T: torch.Tensor) -> torch.Tensor:
    """arXiv 2606.09821 with delta = 12.5."""
    return ratio_T * advantages_T - advantages_T.abs() / (2 * 12.5) * mu_T * (ratio_T - 1) ** 2


@pytest.mark.parametrize(("preset", "loss"), [("spo", spo), ("drpo", drpo)])
def test_gradient_equals_the_papers_objective(preset: str, loss: Loss) -> None:
    streams = random_streams(4, (5000,), spread=0.5)
    ratio_T = (streams.logprobs_T - streams.anchor_logprobs_T).exp()
    value_T = loss(ratio_T, streams.advantages_T, streams.anchor_logprobs_T.exp())
    (expected_T,) = torch.autograd.grad(-value_T[streams.mask_T].sum(), streams.logprobs_T)
    gradient_T = gradient_of(PenalizedGradient(PRESETS[preset].cell), streams)
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("estimator", ["mc", "atomic"])
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_cell_pulls_by_the_slope_of_its_divergence(name: str, estimator: str) -> None:
    """Slopes by central differences of the divergence; delta differs below and above r = 1."""
    cell = Cell(name, estimator, 0.1, 0.4, alpha=0.3 if name == "alpha" else None)
    streams = random_streams(5, (300,), spread=0.5, masked=0.0)
    ours_T = -gradient_of(PenalizedGradient(cell), streams)
    log_pi_T, step = streams.logprobs_T.detach(), 1e-6
    ahead_T, behind_T = (
        PenalizedGradient(cell)._divergence(log_pi_T + move, streams.anchor_logprobs_T)[0] for move in (step, -step)
    )
    log_ratio_T = log_pi_T - streams.anchor_logprobs_T
    pull_T = (ahead_T - behind_T) / (2 * step) / torch.where(log_ratio_T < 0, 0.1, 0.4)
    expected_T = log_ratio_T.exp() * streams.advantages_T - streams.advantages_T.abs() * pull_T
    torch.testing.assert_close(ours_T, expected_T, rtol=1e-6, atol=1e-7)


def test_spo_by_hand() -> None:
    """c = r A (1 - sign(A)(r - 1) / eps): near 0 at r = 1.19 for A > 0, reversed at 1.4, and grows inward."""
    log_mu = [-2.0] * 4
    streams = streams_of([-2.0 + math.log(ratio) for ratio in (1.19, 1.4, 0.9, 1.4)], log_mu, [1.0, 1.0, 1.0, -1.0])
    objective = PenalizedGradient(PRESETS["spo"].cell)
    assert (-gradient_of(objective, streams)).tolist() == pytest.approx([1.19 * 0.05, -1.4, 1.35, -4.2])
    numbers = numbers_of(objective(streams).metrics)
    assert numbers["penalty/reversed"] == pytest.approx(1 / 4)
    assert numbers["divergence/mean"] == pytest.approx((0.19**2 / 2 + 0.08 + 0.005 + 0.08) / 4)
    assert objective(streams).kept_T.tolist() == [True, False, True, True]


def test_the_published_drpo_never_turns_a_token_around() -> None:
    """With delta = 12.5 the weight stays within 8 % of r A, because |pi - mu| is at most 1."""
    log_mu_T = torch.linspace(-12, -1e-3, 200, dtype=torch.float64).repeat(200)
    log_pi_T = torch.linspace(-12, -1e-3, 200, dtype=torch.float64).repeat_interleave(200)
    for advantage in (1.0, -1.0):
        streams = streams_of(log_pi_T, log_mu_T, torch.full_like(log_mu_T, advantage))
        weights_T = -gradient_of(PenalizedGradient(PRESETS["drpo"].cell), streams) / advantage
        relative_T = weights_T / (log_pi_T - log_mu_T).exp()
        assert 0.92 <= relative_T.min() < 0.93
        assert 1.07 < relative_T.max() <= 1.08


@settings(max_examples=60, deadline=None)
@given(POISONS, MASKS)
def test_values_that_are_not_finite_never_leak(poison: list[Poison], mask: list[bool]) -> None:
    lost = token_by_token({"logprobs_T", "anchor_logprobs_T", "advantages_T"})(poison, mask)
    for preset in ("spo", "drpo"):
        result = assert_poison_stays(PenalizedGradient(PRESETS[preset].cell), poison, mask, lost)
        assert numbers_of(result.metrics)["policy/non_finite"] == sum(mask[position] for position in lost)


def test_enormous_ratios_stay_finite_in_float32() -> None:
    streams = streams_of([-1.0, -1.0, -90.0], [-90.0, -90.0, -1.0], [-1.0, 1.0, 1.0], dtype=torch.float32)
    for preset in ("spo", "drpo"):
        assert gradient_of(PenalizedGradient(PRESETS[preset].cell), streams).isfinite().all()


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (Cell("kl_fwd", "binary", 0.1, 0.1), "mc or atomic, not 'binary'"),
        (Cell("kl_fwd", "mc", 0.1, 0.1, ratio_guard=(0.5, 2.0)), "ratio_guard"),
    ],
)
def test_a_penalty_refuses_what_it_cannot_use(cell: Cell, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PenalizedGradient(cell)
