"""The policy-gradient loss: gradients against clip formulations, published cases, poisoned inputs, metrics."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import lambertw, rel_entr

from gppo_megatron.metrics import Max, Mean, StepMetrics, Sum
from gppo_megatron.objective.policy_gradient import (
    MaximumLikelihood,
    Objective,
    PolicyGradient,
)
from gppo_megatron.objective.presets import PRESETS, Cell
from gppo_megatron.objective.trust_region import TrustRegion
from tests.numeric.streams import (
    MASKS,
    POISONS,
    Poison,
    assert_finite,
    assert_poison_stays,
    gradient_of,
    streams_of,
    token_by_token,
)

KNOWN = json.loads((Path(__file__).parent.parent / "data" / "known_answers.json").read_text(encoding="utf-8"))
Array = NDArray[np.float64]


def objective_of(preset: str, ratio_cap: float | None = None, dual_clip: float | None = None) -> PolicyGradient:
    return PolicyGradient(TrustRegion(PRESETS[preset].cell), ratio_cap, dual_clip)


CASES = [(case, test) for case in KNOWN["special_cases"] for test in case["tests"]]


@pytest.mark.parametrize(("case", "test"), CASES, ids=lambda value: value.get("method") or f"r={value['r']}")
def test_published_cases(case: dict, test: dict) -> None:
    divergence, estimator = case["cell"].split(" x ")
    region = TrustRegion(
        Cell(divergence, estimator, float(case["config"]["delta_lo"]), float(case["config"]["delta_hi"]))
    )
    streams = streams_of([test["log_mu_f64"] + test["log_r_f64"]], [test["log_mu_f64"]], [test["A"]])
    decision = region.decide(streams.logprobs_T, streams.anchor_logprobs_T, streams.advantages_T)
    assert decision.divergence_T.item() == pytest.approx(float(test["D"]), rel=1e-11)
    assert bool(decision.keep_T) is test["keep"]
    assert -gradient_of(PolicyGradient(region), streams).item() == pytest.approx(test["grad_coef_of_logpi"], rel=1e-12)


# Independent formulations: the interval [lo, hi] of the ratio, worked out without the divergence code.
def fixed(low: float, high: float) -> Callable[[Array], tuple[Array, Array]]:
    return lambda mu: (np.full_like(mu, low), np.full_like(mu, high))


def dppo_tv(mu: Array) -> tuple[Array, Array]:
    return 1 - 0.15 / mu, 1 + 0.15 / mu


def ripo(mu: Array) -> tuple[Array, Array]:
    radius = np.sqrt(0.05 / mu)
    return 1 - radius, 1 + radius


def ripo_guarded(mu: Array) -> tuple[Array, Array]:
    low, high = ripo(mu)
    return np.maximum(low, 0.5), np.minimum(high, 10)


def gppo(mu: Array) -> tuple[Array, Array]:
    """r - 1 - log r = delta / mu in closed form; W_-1 underflows to the left for a tiny mu: there r <= 1 / mu binds."""
    with np.errstate(invalid="ignore"):
        argument = -np.exp(-1 - 0.025 / mu)
        low, high = -lambertw(argument, 0).real, -lambertw(argument, -1).real
    return low, np.where(np.isfinite(high), high, 1 / mu)


def dppo_kl(mu: Array) -> tuple[Array, Array]:
    """Bisection of KL(mu || pi) of two Bernoulli distributions, in pi."""

    def bound(end: float) -> Array:
        inside, outside = mu.copy(), np.full_like(mu, end)
        for _ in range(80):
            middle = (inside + outside) / 2
            within = rel_entr(mu, middle) + rel_entr(1 - mu, 1 - middle) <= 0.05
            inside, outside = np.where(within, middle, inside), np.where(within, outside, middle)
        return inside / mu

    return bound(0.0), bound(1.0)


INTERVALS = {
    "ppo": fixed(0.8, 1.2),
    "grpo": fixed(0.8, 1.2),
    "dr_grpo": fixed(0.8, 1.2),
    "dapo": fixed(0.8, 1.28),
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ripo": ripo,
    "ripo_guarded": ripo_guarded,
    "gppo": gppo,
}


def test_every_masking_preset_has_an_interval() -> None:
    masking = {name for name, preset in PRESETS.items() if preset.surrogate == "mask" and preset.ratio_cap is None}
    assert set(INTERVALS) == {name for name in masking if not PRESETS[name].cell.from_head}


@pytest.mark.parametrize("preset", INTERVALS)
def test_gradient_equals_the_clip_formulation(preset: str) -> None:
    count = 100_000
    random = torch.Generator().manual_seed(17)
    log_mu_T = torch.nn.functional.logsigmoid(3 * torch.randn(count, generator=random, dtype=torch.float64) - 1)
    log_ratio_T = 0.7 * torch.randn(count, generator=random, dtype=torch.float64)
    log_pi_T = torch.minimum(log_mu_T + log_ratio_T, log_mu_T / 1000)
    streams = streams_of(log_pi_T, log_mu_T, torch.randn(count, generator=random, dtype=torch.float64))
    region = TrustRegion(PRESETS[preset].cell)
    gradient_T = gradient_of(PolicyGradient(region), streams)

    low_T, high_T = map(torch.from_numpy, INTERVALS[preset](log_mu_T.exp().numpy()))
    ratio_T = (streams.logprobs_T - log_mu_T).exp()
    clipped_T = torch.minimum(torch.maximum(ratio_T, low_T), high_T)
    surrogate_T = torch.minimum(ratio_T * streams.advantages_T, clipped_T * streams.advantages_T)
    (expected_T,) = torch.autograd.grad(-surrogate_T.sum(), streams.logprobs_T)

    decision = region.decide(log_pi_T, log_mu_T, streams.advantages_T)
    delta_T = torch.where(streams.advantages_T > 0, region.cell.delta_high, region.cell.delta_low)
    tie_T = (decision.divergence_T - delta_T).abs() < 1e-9
    assert tie_T.sum() <= 3
    assert (decision.keep_T.logical_not().sum() > 1000) & (decision.keep_T.sum() > 1000)
    torch.testing.assert_close(gradient_T[~tie_T], expected_T[~tie_T], rtol=1e-12, atol=1e-12)


def test_a_step_raises_good_actions_and_lowers_bad_ones() -> None:
    for advantage in (1.0, -1.0):
        logits = torch.zeros(2, requires_grad=True)
        logprobs_T = torch.log_softmax(logits, 0)[:1]
        streams = dataclasses.replace(
            streams_of([0.0], [math.log(0.5)], [advantage], dtype=torch.float32), logprobs_T=logprobs_T
        )
        (gradient,) = torch.autograd.grad(objective_of("gppo")(streams).loss_T.sum(), logits)
        assert (-gradient[0]).item() == pytest.approx(advantage / 2)


def test_loss_values_are_weighted_log_probs() -> None:
    streams = streams_of([-1.0, -2.0], [-1.1, -1.9], [2.0, -0.5])
    loss_T = objective_of("ppo")(streams).loss_T
    torch.testing.assert_close(loss_T.tolist(), [2.0 * math.exp(0.1), -0.5 * math.exp(-0.1) * 2.0])


def test_ratio_cap_truncates_the_weight_and_dual_clip_removes_the_gradient() -> None:
    """Ratios 2 and 6, both moving back inward for A < 0, and 6 outward but within a wide cell for A > 0."""
    log_mu = [-6.0] * 4
    log_pi = [-6.0 + math.log(ratio) for ratio in (2.0, 6.0, 6.0, 0.5)]
    wide = TrustRegion(Cell("kl_fwd", "atomic", 1.0, 1.0))
    streams = streams_of(log_pi, log_mu, [-1.0, -1.0, 1.0, 1.0])

    def coefficients(ratio_cap: float | None, dual_clip: float | None) -> list[float]:
        return (-gradient_of(PolicyGradient(wide, ratio_cap, dual_clip), streams)).tolist()

    assert coefficients(None, None) == pytest.approx([-2.0, -6.0, 6.0, 0.5])
    assert coefficients(3.0, None) == pytest.approx([-2.0, -3.0, 3.0, 0.5])
    assert coefficients(None, 3.0) == pytest.approx([-2.0, 0.0, 6.0, 0.5])
    assert coefficients(5.0, 3.0) == pytest.approx([-2.0, 0.0, 5.0, 0.5])


def test_dual_clip_equals_its_maximum_formulation() -> None:
    random = torch.Generator().manual_seed(2)
    log_mu_T = -3 - torch.rand(20_000, generator=random, dtype=torch.float64)
    log_pi_T = log_mu_T + torch.randn(20_000, generator=random, dtype=torch.float64)
    streams = streams_of(log_pi_T, log_mu_T, torch.randn(20_000, generator=random, dtype=torch.float64))
    ratio_T, advantages_T = (streams.logprobs_T - log_mu_T).exp(), streams.advantages_T
    clipped_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
    surrogate_T = torch.where(advantages_T < 0, torch.maximum(clipped_T, 3.0 * advantages_T), clipped_T)
    (expected_T,) = torch.autograd.grad(-surrogate_T.sum(), streams.logprobs_T)
    gradient_T = gradient_of(objective_of("ppo", dual_clip=3.0), streams)
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limits", [(0.9, None), (None, 0.5), (math.nan, None)])
def test_a_limit_below_one_is_refused(limits: tuple[float | None, float | None]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        objective_of("gppo", *limits)


def test_enormous_ratios_stay_finite_in_float32() -> None:
    streams = streams_of([-1.0, -1.0, -90.0], [-90.0, -90.0, -1.0], [-1.0, 1.0, 1.0], dtype=torch.float32)
    gradient_T = gradient_of(objective_of("gppo"), streams)
    assert gradient_T.tolist() == pytest.approx([math.exp(20), 0.0, -math.exp(-20)], rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(POISONS, MASKS, st.sampled_from([*INTERVALS, "maximum likelihood"]))
def test_values_that_are_not_finite_never_leak(poison: list[Poison], mask: list[bool], name: str) -> None:
    objective = MaximumLikelihood() if name == "maximum likelihood" else objective_of(name)
    decisive = {"logprobs_T"} if name == "maximum likelihood" else {"logprobs_T", "anchor_logprobs_T", "advantages_T"}
    lost = token_by_token(decisive)(poison, mask)
    result = assert_poison_stays(objective, poison, mask, lost)
    assert result.metrics["policy/non_finite"] == Sum(torch.tensor(float(sum(mask[position] for position in lost))))


@pytest.mark.parametrize(
    "objective", [objective_of("gppo"), objective_of("ppo", 5.0, 3.0), MaximumLikelihood()], ids=repr
)
def test_an_empty_mask_has_a_graph_a_zero_loss_and_no_nan(objective: Objective) -> None:
    streams = streams_of([-1.0, math.nan], [-1.0, -2.0], [1.0, 1.0], [False, False], torch.float32)
    result = objective(streams)
    assert_finite(result)
    assert result.loss_T.requires_grad
    assert result.loss_T.tolist() == [0.0, 0.0]
    assert gradient_of(objective, streams).tolist() == [0.0, 0.0]
    assert all(float(metric.weight) == 0 for metric in result.metrics.values() if isinstance(metric, Mean))
    numbers = StepMetrics(dict(result.metrics)).flat()
    assert all(math.isnan(number) for name, number in numbers.items() if name != "policy/non_finite"), numbers


def test_metrics() -> None:
    """Ratios 1.5 (A > 0, masked), 1.1 (A > 0), .7 (A < 0, masked), 4 (A < 0), 1 (A = 0), outside the mask, NaN."""
    ratios = [1.5, 1.1, 0.7, 4.0, 1.0, 9.0, math.nan]
    log_mu = [-3.0] * 7
    log_pi = [-3.0 + math.log(ratio) for ratio in ratios]
    mask = [True] * 5 + [False, True]
    streams = streams_of(log_pi, log_mu, [1.0, 1.0, -1.0, -1.0, 0.0, 1.0, 1.0], mask, age=[0, 0, 2, 3, 0, 0, 9])
    metrics = objective_of("ppo", ratio_cap=1.4, dual_clip=3.0)(streams).metrics
    logs = [math.log(ratio) for ratio in ratios[:5]]
    want = {
        "kept/positive": 1 / 3,
        "kept/negative": 1 / 2,
        "divergence/mean": (0.5 + 0.1 + 0.3 + 3.0) / 2 / 5,
        "divergence/mc": (0.5 + 0.1 + 0.3 + 3.0) / 2 / 5,
        "ratio/mean": 8.3 / 5,
        "ratio/max": 4.0,
        "ratio/capped": 2 / 5,
        "policy/entropy": sum(3.0 - log for log in logs) / 2 / 5,
        # the third and fourth tokens were sampled by an older policy
        "policy/sampler_gap": sum(abs(logs[place] + 0.125) for place in (0, 1, 4)) / 3,
        "policy/sampler_gap_max": max(abs(logs[place] + 0.125) for place in (0, 1, 4)),
        "policy/age": 1.0,
        "policy/log_ratio": sum(logs) / 5,
        "policy/non_finite": 1.0,
    }
    assert {name: float(metric.value) for name, metric in metrics.items()} == pytest.approx(want)
    assert isinstance(metrics["ratio/max"], Max)


def test_divergence_metrics_differ_by_estimator() -> None:
    """mu = 1/4, pi = 1/2 under chi2 / 2: one atom is (1/4) f(2) = 1/8, Monte Carlo f(2) = 1/2."""
    metrics = objective_of("ripo")(streams_of([math.log(0.5)], [math.log(0.25)], [1.0])).metrics
    assert metrics["divergence/mean"].value == pytest.approx(1 / 8)
    assert metrics["divergence/mc"].value == pytest.approx(1 / 2)


def test_maximum_likelihood() -> None:
    streams = streams_of([-1.0, -2.0, -3.0], [0.0, 0.0, 0.0], [-1.0, 0.0, 5.0], [True, True, False])
    result = MaximumLikelihood()(streams)
    assert result.loss_T.tolist() == [1.0, 2.0, 0.0]
    assert gradient_of(MaximumLikelihood(), streams).tolist() == [-1.0, -1.0, 0.0]
    assert {name: float(metric.value) for name, metric in result.metrics.items()} == {
        "policy/nll": 1.5,
        "policy/entropy": 0.75,
        "policy/non_finite": 0.0,
    }
