"""Divergences and estimators against 40-digit tables, 50-digit arithmetic and whole distributions."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import mpmath
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mpmath import mpf

from gppo_megatron.objective.divergences import GENERATORS, Generator, generator_of
from gppo_megatron.objective.estimators import ESTIMATORS, log_complement
from gppo_megatron.objective.presets import DIVERGENCES
from gppo_megatron.objective.presets import TOKEN_ESTIMATORS as ESTIMATOR_NAMES

KNOWN = json.loads((Path(__file__).parent.parent / "data" / "known_answers.json").read_text(encoding="utf-8"))
PLAIN = tuple(name for name in DIVERGENCES if name != "alpha")
ROWS = [(name, None) for name in PLAIN] + [("alpha", alpha) for alpha in (-1.5, -0.5, 0.25, 1.001, 1.5, 2.5)]

FORMULAS: dict[str, Callable[[mpf], mpf]] = {
    "tv": lambda r: abs(r - 1) / 2,
    "kl_fwd": lambda r: r - 1 - mpmath.log(r),
    "kl_rev": lambda r: r * mpmath.log(r) - r + 1,
    "js": lambda r: 2 * (r * mpmath.log(r) - (r + 1) * mpmath.log((r + 1) / 2)),
    "hellinger2": lambda r: 2 * (mpmath.sqrt(r) - 1) ** 2,
    "chi2_pearson": lambda r: (r - 1) ** 2 / 2,
    "chi2_neyman": lambda r: (r - 1) ** 2 / (2 * r),
}


def formula(name: str, alpha: float | None) -> Callable[[mpf], mpf]:
    if alpha is None:
        return FORMULAS[name]
    a = mpf(alpha)
    return lambda r: (r**a - a * r + a - 1) / (a * (a - 1))


def expected(name: str, alpha: float | None, estimator: str, log_pi: float, log_mu: float) -> float:
    f = formula(name, alpha)
    with mpmath.workdps(50):
        pi, mu = mpmath.exp(mpf(log_pi)), mpmath.exp(mpf(log_mu))
        value = {
            "mc": lambda: f(pi / mu),
            "atomic": lambda: mu * f(pi / mu),
            "binary": lambda: mu * f(pi / mu) + (1 - mu) * f((1 - pi) / (1 - mu)),
        }[estimator]()
        return float(value)


def tolerance(estimator: str, log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    """A few roundings of the terms of size |log r| times their weight, which cancel where r is close to 1."""
    near = 1e-15 * (log_pi_T - log_mu_T).abs().clamp_max(1.0)
    if estimator == "mc":
        return near
    near = near * log_mu_T.exp()
    if estimator == "binary":
        gap = (log_complement(log_pi_T) - log_complement(log_mu_T)).abs().clamp_max(1.0)
        near = near + 1e-15 * gap * log_complement(log_mu_T).exp()
    return near


def test_tables_hold_exactly_the_names_of_the_configuration() -> None:
    assert tuple(GENERATORS) == DIVERGENCES
    assert tuple(ESTIMATORS) == ESTIMATOR_NAMES


@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@pytest.mark.parametrize(
    ("field", "name"), [("values", n) for n in PLAIN] + [("values_alpha", a) for a in (-0.5, 0.25, 1.5)]
)
def test_known_values(field: str, name: str | float, estimator: str) -> None:
    generator = generator_of(name) if isinstance(name, str) else generator_of("alpha", name)
    rows = KNOWN["values"]
    log_pi_T, log_mu_T = (
        torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in ("log_pi_f64", "log_mu_f64")
    )
    want_T = torch.tensor([float(row[field][str(name)][estimator]) for row in rows], dtype=torch.float64)
    got_T = ESTIMATORS[estimator](generator, log_pi_T, log_mu_T)
    assert len(rows) == 29
    assert want_T.isfinite().all()
    assert ((got_T - want_T).abs() <= 1e-11 * want_T + tolerance(estimator, log_pi_T, log_mu_T)).all()


def test_matched_thresholds() -> None:
    shifts = {".15": 0.15, "-.15": -0.15, ".2": 0.2, "sqrt(.025)": math.sqrt(0.025)}
    checked = 0
    for table, estimator in (("mc", "mc"), ("atomic_mu=0.5_Delta", "atomic"), ("binary", "binary")):
        for name, cases in KNOWN["matched_thresholds"][table].items():
            for label, value in cases.items():
                mu = 0.5
                pi = mu * float(label[2:-1]) if table == "mc" else mu + shifts[label.removeprefix("mu=.5,").lstrip("+")]
                log_pi_T, log_mu_T = torch.tensor([[math.log(pi)], [math.log(mu)]], dtype=torch.float64)
                got = ESTIMATORS[estimator](generator_of(name), log_pi_T, log_mu_T).item()
                assert got == pytest.approx(float(value), rel=1e-12)
                checked += 1
    assert checked == 63


log_odds = st.floats(-30, 30)


def log_probability(odds: float) -> float:
    return -math.log1p(math.exp(-odds))


@settings(max_examples=60, deadline=None)
@given(st.tuples(log_odds, log_odds), st.sampled_from(ROWS), st.sampled_from(ESTIMATOR_NAMES))
def test_values_that_are_in_no_table(odds: tuple[float, float], row: tuple[str, float | None], estimator: str) -> None:
    log_pi, log_mu = map(log_probability, odds)
    log_pi_T, log_mu_T = torch.tensor([[log_pi], [log_mu]], dtype=torch.float64)
    got_T = ESTIMATORS[estimator](generator_of(*row), log_pi_T, log_mu_T)
    want = expected(*row, estimator, log_pi, log_mu)
    if estimator == "mc" and abs(log_pi - log_mu) > 30:  # saturates on purpose
        assert got_T.item() > 0.5
        return
    assert abs(got_T.item() - want) <= 1e-10 * want + 20 * tolerance(estimator, log_pi_T, log_mu_T).item()


@settings(max_examples=60, deadline=None)
@given(st.floats(-8, 0), st.floats(-2e-3, 2e-3), st.sampled_from(ROWS))
def test_close_probabilities_keep_their_small_divergence(
    log_mu: float, log_ratio: float, row: tuple[str, float | None]
) -> None:
    log_pi = min(log_mu + log_ratio, 0.0)
    assume(abs(log_pi - log_mu) > 1e-20)  # the reference has 50 digits
    log_pi_T, log_mu_T = torch.tensor([[log_pi], [log_mu]], dtype=torch.float64)
    got = generator_of(*row).atomic(log_pi_T, log_mu_T).item()
    want = expected(*row, "atomic", log_pi, log_mu)
    assert abs(got - want) <= 1e-10 * want + 20 * tolerance("atomic", log_pi_T, log_mu_T).item()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_order_of_estimators_and_unbiased_monte_carlo(row: tuple[str, float | None]) -> None:
    generator, f = generator_of(*row), formula(*row)
    random = torch.Generator().manual_seed(3)
    for size in (2, 2, 3, 5, 8):
        pi_T, mu_T = torch.softmax(2 * torch.randn(2, size, generator=random, dtype=torch.float64), dim=1)
        with mpmath.workdps(50):
            exact = float(sum(mpf(m) * f(mpf(p) / mpf(m)) for p, m in zip(pi_T.tolist(), mu_T.tolist(), strict=True)))
        mc_T, atomic_T, binary_T = (ESTIMATORS[name](generator, pi_T.log(), mu_T.log()) for name in ESTIMATOR_NAMES)
        assert (mu_T * mc_T).sum().item() == pytest.approx(exact, rel=1e-12)
        assert atomic_T.sum().item() == pytest.approx(exact, rel=1e-12)
        assert (atomic_T >= 0).all()
        assert (atomic_T <= binary_T).all()
        assert (binary_T <= exact * (1 + 1e-12)).all()
        if size == 2:
            torch.testing.assert_close(binary_T, torch.full_like(binary_T, exact), rtol=1e-12, atol=0)


def test_direction_of_each_kl() -> None:
    mu, pi = 0.2, 0.6
    log_pi_T, log_mu_T = torch.tensor([[math.log(pi)], [math.log(mu)]], dtype=torch.float64)
    of_mu = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    of_pi = pi * math.log(pi / mu) + (1 - pi) * math.log((1 - pi) / (1 - mu))
    assert abs(of_mu - of_pi) > 0.01
    binary = ESTIMATORS["binary"]
    assert binary(generator_of("kl_fwd"), log_pi_T, log_mu_T).item() == pytest.approx(of_mu, rel=1e-12)
    assert binary(generator_of("kl_rev"), log_pi_T, log_mu_T).item() == pytest.approx(of_pi, rel=1e-12)


@pytest.mark.parametrize(
    ("alpha", "name"),
    [(-1.0, "chi2_neyman"), (0.0, "kl_fwd"), (0.5, "hellinger2"), (1.0, "kl_rev"), (2.0, "chi2_pearson")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alpha_family_meets_the_named_divergences(alpha: float, name: str, dtype: torch.dtype) -> None:
    log_pi_T, log_mu_T = -torch.rand(2, 500, generator=torch.Generator().manual_seed(1), dtype=dtype) * 6 - 0.01
    step = torch.finfo(dtype).eps ** 0.5
    named_T = generator_of(name).atomic(log_pi_T, log_mu_T)
    for near in (alpha - step / 10, alpha, alpha + step / 10):
        got_T = generator_of("alpha", near).atomic(log_pi_T, log_mu_T)
        torch.testing.assert_close(got_T, named_T, rtol=30 * step, atol=3 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ESTIMATOR_NAMES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_extreme_probabilities_give_numbers(row: tuple[str, float | None], estimator: str, dtype: torch.dtype) -> None:
    edges = torch.tensor(
        [0.0, 1e-8, -1e-30, -1e-8, -1e-6, -1e-3, -0.5, -1, -5, -20, -60, -87, -150, -800, -1e4], dtype=dtype
    )
    log_pi_T, log_mu_T = (grid.flatten() for grid in torch.meshgrid(edges, edges, indexing="ij"))
    value_T = ESTIMATORS[estimator](generator_of(*row), log_pi_T, log_mu_T)
    assert not value_T.isnan().any()
    assert (value_T >= 0).all()
    assert (value_T[log_pi_T == log_mu_T] == 0).all()


@pytest.mark.parametrize("name", ["kl_fwd", "chi2_neyman"])
def test_binary_sees_a_token_that_became_certain(name: str) -> None:
    log_pi_T, log_mu_T = torch.tensor([0.0, 0.0]), torch.tensor([math.log(0.9), 0.0])
    value_T = ESTIMATORS["binary"](generator_of(name), log_pi_T, log_mu_T)
    assert value_T[0] > 1.0
    assert value_T[1] == 0.0


@pytest.mark.parametrize("estimator", ["atomic", "binary"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_float32_error_of_small_divergences(row: tuple[str, float | None], estimator: str) -> None:
    random = torch.Generator().manual_seed(5)
    log_mu_T = torch.nn.functional.logsigmoid(4 * torch.randn(4000, generator=random))
    log_pi_T = (log_mu_T + 0.3 * torch.randn(4000, generator=random)).clamp_max(-1e-4)
    generator = generator_of(*row)
    single_T = ESTIMATORS[estimator](generator, log_pi_T, log_mu_T).double()
    double_T = ESTIMATORS[estimator](generator, log_pi_T.double(), log_mu_T.double())
    small_T = double_T < 1e-3
    assert small_T.sum() > 500
    assert (single_T - double_T)[small_T].abs().max() < 1e-6


def test_a_parameter_is_given_exactly_where_it_has_a_meaning() -> None:
    with pytest.raises(ValueError, match="has no parameter"):
        generator_of("tv", 0.5)
    with pytest.raises(ValueError, match="needs alpha"):
        generator_of("alpha")
    with pytest.raises(ValueError, match="must be finite"):
        generator_of("alpha", math.nan)
    assert isinstance(generator_of("alpha", 0.3), Generator)
