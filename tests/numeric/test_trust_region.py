"""Keep and mask decisions: tabulated ratio bounds, direction, ties, float32 against float64."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch

from gppo_megatron.metrics import Sum
from gppo_megatron.objective.policy_gradient import PolicyGradient, TokenStreams
from gppo_megatron.objective.presets import DIVERGENCES, HEAD_ESTIMATORS, PRESETS, TOKEN_ESTIMATORS, Cell
from gppo_megatron.objective.trust_region import TrustRegion

KNOWN = json.loads((Path(__file__).parent.parent / "data" / "known_answers.json").read_text(encoding="utf-8"))
CELLS = [
    (name, estimator, alpha)
    for estimator in TOKEN_ESTIMATORS
    for name in DIVERGENCES
    for alpha in ((-0.5, 0.25, 1.5) if name == "alpha" else (None,))
]


def keeps(cell: Cell, log_pi: float, log_mu: float, advantage: float, dtype: torch.dtype = torch.float64) -> bool:
    log_pi_T, log_mu_T, advantages_T = torch.tensor([[log_pi], [log_mu], [advantage]], dtype=dtype)
    return bool(TrustRegion(cell).decide(log_pi_T, log_mu_T, advantages_T).keep_T)


def moved(log_p: mpmath.mpf, step: float) -> float:
    """log p after a move of its log-odds by `step`, relative where the log-odds are large."""
    odds = log_p - mpmath.log1p(-mpmath.exp(log_p))
    odds += step * max(1, abs(odds))
    return float(-mpmath.log1p(mpmath.exp(-odds)))


@pytest.mark.parametrize(
    "row", KNOWN["ratio_bounds"], ids=lambda r: f"{r['divergence']}-{r['estimator']}-{r['mu_spec']}-{r['delta']}"
)
def test_ratio_bounds(row: dict[str, Any]) -> None:
    """Just inside a bound is kept, just outside is masked; where there is no bound, the whole side is inside."""
    delta, log_mu = float(row["delta"]), row["log_mu_f64"]
    cell = Cell(row["divergence"], row["estimator"], delta, delta)
    lenient = Cell(row["divergence"], row["estimator"], delta * (1 + 1e-12), delta * (1 + 1e-12))
    with mpmath.workdps(60):
        if row["lo_unconstrained"]:
            assert keeps(lenient, -1e6, log_mu, -1.0)
        else:
            bound = mpmath.mpf(row["log_mu"]) + mpmath.mpf(row["log_r_lo"])
            assert keeps(cell, moved(bound, 1e-6), log_mu, -1.0)
            assert not keeps(cell, moved(bound, -1e-6), log_mu, -1.0)
        bound = mpmath.mpf(row["log_mu"]) + mpmath.mpf(row["log_r_hi"] or 0)
        if row["hi_unconstrained"] or bound > -1e-30:  # the bound is so close to 1 that 40 digits do not tell it apart
            assert keeps(lenient, -1e-30, log_mu, 1.0)
        else:
            assert keeps(cell, moved(bound, -1e-6), log_mu, 1.0)
            assert not keeps(cell, moved(bound, 1e-6), log_mu, 1.0)


@pytest.mark.parametrize("row", KNOWN["ratio_bounds_mc"], ids=lambda r: f"{r['divergence']}-{r['delta']}")
def test_ratio_bounds_of_monte_carlo(row: dict[str, Any]) -> None:
    delta, log_mu = float(row["delta"]), -3.0
    cell = Cell(row["divergence"], "mc", delta, delta)
    high = math.log(float(row["r_hi"]))
    assert keeps(cell, log_mu + high - 1e-9, log_mu, 1.0)
    assert not keeps(cell, log_mu + high + 1e-9, log_mu, 1.0)
    if row["lo_unconstrained"]:
        assert keeps(cell, -1e3, log_mu, -1.0)
    else:
        low = math.log(float(row["r_lo"]))
        assert keeps(cell, log_mu + low + 1e-9, log_mu, -1.0)
        assert not keeps(cell, log_mu + low - 1e-9, log_mu, -1.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "kept"),
    [
        (1.25, 1.0, True),
        (1.3, 1.0, False),
        (0.75, 1.0, True),
        (0.75, -1.0, False),
        (0.85, -1.0, True),
        (1.3, -1.0, True),
    ]
    + [(9.0, 0.0, True), (0.01, 0.0, True)],
)
def test_only_outward_moves_are_masked_and_each_side_has_its_threshold(
    ratio: float, advantage: float, kept: bool
) -> None:
    """Clip-higher, [0.8, 1.28]: a threshold on the wrong side or a flipped sign changes at least one row."""
    assert keeps(PRESETS["dapo"].cell, math.log(0.3 * ratio), math.log(0.3), advantage) is kept


def test_gppo_is_the_divergence_from_the_anchor_to_the_policy() -> None:
    """mu = 1e-4, pi = .02: mu log(mu / pi) + pi - mu = .0194 lies within .025, the other direction (.086) does not."""
    assert keeps(PRESETS["gppo"].cell, math.log(0.02), math.log(1e-4), 1.0)
    assert not keeps(Cell("kl_rev", "atomic", 0.025, 0.025), math.log(0.02), math.log(1e-4), 1.0)
    assert not keeps(PRESETS["gppo"].cell, math.log(0.03), math.log(1e-4), 1.0)


@pytest.mark.parametrize(("name", "estimator", "alpha"), CELLS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_divergence_equal_to_the_threshold_is_kept(
    name: str, estimator: str, alpha: float | None, advantage: float
) -> None:
    log_mu, log_pi = math.log(0.3), math.log(0.3) + 0.4 * advantage
    tensors = torch.tensor([[log_pi], [log_mu], [advantage]], dtype=torch.float64)
    value = TrustRegion(Cell(name, estimator, 1.0, 1.0, alpha)).decide(*tensors).divergence_T.item()
    below = math.nextafter(value, 0.0)
    high, low = (value, below) if advantage > 0 else (below, value)
    assert keeps(Cell(name, estimator, low, high, alpha), log_pi, log_mu, advantage)
    assert not keeps(Cell(name, estimator, high, low, alpha), log_pi, log_mu, advantage)


@pytest.mark.parametrize(("name", "estimator", "alpha"), CELLS)
def test_inputs_that_are_not_finite_are_never_kept(name: str, estimator: str, alpha: float | None) -> None:
    bad = (math.nan, math.inf, -math.inf)
    rows = [(value, -1.0, 1.0) for value in bad] + [(-1.0, value, 1.0) for value in bad]
    rows += [(-1.0, -1.0, value) for value in bad] + [(-1.0, -1.1, 1.0), (0.0, 0.0, 1.0), (0.0, 0.0, -1.0)]
    for dtype in (torch.float32, torch.float64):
        decision = TrustRegion(Cell(name, estimator, 9.0, 9.0, alpha)).decide(*torch.tensor(rows, dtype=dtype).T)
        assert decision.keep_T.tolist() == [False] * 9 + [True] * 3
        assert decision.finite_T.tolist() == [False] * 9 + [True] * 3
        assert decision.divergence_T[-2:].tolist() == [0.0, 0.0]


def test_a_divergence_that_is_no_number_is_never_kept() -> None:
    """A log-prob of 1000 is impossible but finite; its KL is inf - inf."""
    decision = TrustRegion(Cell("kl_rev", "atomic", 9.0, 9.0)).decide(*torch.tensor([[1000.0], [-1.0], [-1.0]]))
    assert decision.divergence_T.isnan().all()
    assert not decision.keep_T.any()
    assert not decision.finite_T.any()


def test_ratio_guard_masks_outward_moves_that_the_cell_allows() -> None:
    pure, guarded = PRESETS["ripo"].cell, PRESETS["ripo_guarded"].cell
    log_mu = math.log(1e-3)  # the cell alone allows ratios 0 to 8.07; at 1e-4, to 23.4
    for log_ratio, log_anchor, advantage, kept in [
        (math.log(0.51), log_mu, -1.0, True),
        (math.log(0.49), log_mu, -1.0, False),
        (math.log(0.49), log_mu, 1.0, True),
        (math.log(9.9), math.log(1e-4), 1.0, True),
        (math.log(10.1), math.log(1e-4), 1.0, False),
        (math.log(10.1), math.log(1e-4), -1.0, True),
    ]:
        assert keeps(pure, log_anchor + log_ratio, log_anchor, advantage)
        assert keeps(guarded, log_anchor + log_ratio, log_anchor, advantage) is kept


def test_no_gradient_passes_through_a_decision() -> None:
    log_pi_T = torch.tensor([-1.0], requires_grad=True)
    decision = TrustRegion(PRESETS["gppo"].cell).decide(log_pi_T, torch.tensor([-1.5]), torch.tensor([1.0]))
    assert not decision.divergence_T.requires_grad


@pytest.mark.parametrize(("name", "estimator", "alpha"), CELLS)
def test_float32_decides_like_float64(name: str, estimator: str, alpha: float | None) -> None:
    random = torch.Generator().manual_seed(11)
    count = 5000
    log_mu_T = torch.nn.functional.logsigmoid(5 * torch.randn(count, generator=random) - 1)
    log_pi_T = (log_mu_T + torch.randn(count, generator=random)).clamp_max(-1e-4)
    advantages_T = torch.randn(count, generator=random)
    masked = 0
    for delta in (0.005, 0.025, 0.1):
        region = TrustRegion(Cell(name, estimator, delta, delta, alpha))
        single = region.decide(log_pi_T, log_mu_T, advantages_T)
        double = region.decide(log_pi_T.double(), log_mu_T.double(), advantages_T.double())
        assert (single.divergence_T.dtype, double.divergence_T.dtype) == (torch.float32, torch.float64)
        near_T = (double.divergence_T - delta).abs() < 2e-6
        assert near_T.sum() < 10
        assert torch.equal(single.keep_T | near_T, double.keep_T | near_T)
        masked += int((~double.keep_T).sum())
    assert masked > 100


def test_low_precision_inputs_are_decided_in_float32() -> None:
    decision = TrustRegion(PRESETS["ppo"].cell).decide(*torch.tensor([[-1.0], [-1.5], [1.0]], dtype=torch.bfloat16))
    assert decision.divergence_T.dtype == torch.float32
    assert decision.divergence_T.item() == pytest.approx(math.expm1(0.5) / 2, rel=1e-6)


@pytest.mark.parametrize("estimator", HEAD_ESTIMATORS)
def test_a_divergence_of_the_head_decides_as_it_is(estimator: str) -> None:
    """Against thresholds 0.1 (low) and 0.2 (high); the log-probs give the direction alone."""
    region = TrustRegion(Cell("kl_fwd", estimator, 0.1, 0.2))
    rows = [(0.15, 1.0, 1.0), (0.25, 1.0, 1.0), (0.15, -1.0, -1.0), (0.05, -1.0, -1.0), (0.25, 1.0, -1.0)]
    rows += [(math.inf, 1.0, 1.0), (math.inf, -1.0, 1.0), (math.nan, -1.0, 1.0)]
    divergence_T, move_T, advantages_T = torch.tensor(rows).T
    decision = region.decide(-1 + 0.01 * move_T, torch.full_like(move_T, -1.0), advantages_T, divergence_T)
    assert decision.keep_T.tolist() == [True, False, False, True, True, False, True, False]
    assert decision.finite_T.tolist() == [True] * 7 + [False]
    with pytest.raises(ValueError, match=f"estimator '{estimator}' needs a divergence from the LM head"):
        region.decide(move_T, move_T, advantages_T)


def test_a_divergence_of_the_head_that_is_no_number_gets_no_loss() -> None:
    """The second token's is NaN, the third's infinite: outward, so it is masked; outside the mask nothing matters."""
    region = TrustRegion(Cell("kl_rev", "exact", 0.1, 0.1))
    logprobs_T = torch.full((4,), -1.0, requires_grad=True)
    anchor_T, ones_T = torch.full((4,), -1.1), torch.ones(4)
    streams = TokenStreams(
        logprobs_T, ones_T, anchor_T, anchor_T, ones_T, ones_T.long(), torch.tensor([True, True, True, False]),
        divergence_T=torch.tensor([0.05, math.nan, math.inf, math.nan]),
    )  # fmt: skip
    result = PolicyGradient(region)(streams)
    (gradient_T,) = torch.autograd.grad(result.loss_T.sum(), logprobs_T)
    assert gradient_T.tolist() == pytest.approx([-math.exp(0.1), 0, 0, 0])
    assert result.metrics["policy/non_finite"] == Sum(torch.tensor(1.0))
    with pytest.raises(ValueError, match="needs a divergence from the LM head"):
        PolicyGradient(region)(replace(streams, divergence_T=None))
