"""The generators f of the f-divergences D_f = sum_a mu(a) f(pi(a) / mu(a)): one table row each.

Every f has f(1) = f'(1) = 0, and f''(1) = 1 except for total variation. The gauge f'(1) = 0 is what makes an atom
non-negative and a lower bound of D_f. Divergences decide which tokens train; they are no part of a gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 40.0
"""Bound of |log r| in `Generator.mc`: beyond every sensible threshold, and exp(40) squared still fits float32."""

EXPONENT_LIMIT = 80.0
"""Bound of an exponent that a probability multiplies: exp(80) still fits float32."""


@dataclass(frozen=True)
class Generator:
    """A generator f in log space, for float32 and float64 tensors of one shape.

    atomic(log_pi_T, log_mu_T): mu f(pi / mu), worked out without forming the ratio, so that it does not overflow.
    at_zero: f(0), the weight of a mu whose pi is 0. slope: f(r) / r as r grows, the weight of a pi whose mu is 0.
    """

    atomic: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    at_zero: float
    slope: float

    def atoms(self, log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
        """`atomic`, and its limits where a log-probability is -inf: 0 where both are."""
        no_pi_T, no_mu_T = log_pi_T.isneginf(), log_mu_T.isneginf()
        lacking_T = no_pi_T | no_mu_T
        both_T = self.atomic(log_pi_T.masked_fill(lacking_T, 0.0), log_mu_T.masked_fill(lacking_T, 0.0))
        atoms_T = torch.where(no_pi_T, _weighted(log_mu_T, self.at_zero), both_T)
        atoms_T = torch.where(no_mu_T, _weighted(log_pi_T, self.slope), atoms_T)
        return atoms_T.masked_fill(no_pi_T & no_mu_T, 0.0)

    def mc(self, log_ratio_T: torch.Tensor) -> torch.Tensor:
        """f(r): the atom of a token whose mu is 1. |log r| saturates at `LOG_RATIO_LIMIT`."""
        return self.atomic(log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), torch.zeros_like(log_ratio_T))


def _weighted(log_p_T: torch.Tensor, weight: float) -> torch.Tensor:
    """p x weight, for p above 0: infinite where the weight is, though p may be too small for its type."""
    return torch.exp(log_p_T) * weight if math.isfinite(weight) else torch.full_like(log_p_T, weight)


def difference(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """p - q."""
    return _difference(log_p_T, log_q_T, log_p_T - log_q_T)


def _difference(log_p_T: torch.Tensor, log_q_T: torch.Tensor, log_ratio_T: torch.Tensor) -> torch.Tensor:
    """p - q, given log(p / q) as well: through expm1, without cancellation, where p and q are close."""
    near_T = torch.exp(log_q_T) * torch.expm1(log_ratio_T.clamp(-1.0, 1.0))
    return torch.where(log_ratio_T.abs() < 1.0, near_T, torch.exp(log_p_T) - torch.exp(log_q_T))


def _relative(log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
    """p / q - 1, kept finite."""
    return torch.expm1((log_p_T - log_q_T).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT))


def _total_variation(log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    return difference(log_pi_T, log_mu_T).abs() / 2


def _kl_forward(log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    surprise_T = torch.exp(log_mu_T) * (log_pi_T - log_mu_T)
    return (difference(log_pi_T, log_mu_T) - surprise_T).clamp_min(0.0)


def _kl_reverse(log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    return _kl_forward(log_mu_T, log_pi_T)


def _jensen_shannon(log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    # m is the even mixture of pi and mu; log(m / mu) and log(m / pi) through log1p, exact where both are close to 0.
    log_mixture_mu_T = torch.log1p(_relative(log_pi_T, log_mu_T) / 2)
    log_mixture_pi_T = torch.log1p(_relative(log_mu_T, log_pi_T) / 2)
    value_T = -2 * (torch.exp(log_pi_T) * log_mixture_pi_T + torch.exp(log_mu_T) * log_mixture_mu_T)
    return value_T.clamp_min(0.0)


def _hellinger_squared(log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    return 2 * difference(log_pi_T / 2, log_mu_T / 2).square()  # sqrt pi - sqrt mu


def _chi_squared_pearson(log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    return difference(log_pi_T, log_mu_T) * _relative(log_pi_T, log_mu_T) / 2


def _chi_squared_neyman(log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    return _chi_squared_pearson(log_mu_T, log_pi_T)


def alpha_family(alpha: float) -> Generator:
    """f(r) = (r^a - a r + a - 1) / (a (a - 1)), continued to kl_fwd at a = 0 and kl_rev at a = 1.

    a = -1, 1/2 and 2 are chi2_neyman, hellinger2 and chi2_pearson. Raises ValueError for a value that is not finite.
    """
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be finite, got {alpha}")
    if alpha in _LIMITS:
        return _LIMITS[alpha]

    def small_alpha(a: float, log_p_T: torch.Tensor, log_q_T: torch.Tensor) -> torch.Tensor:
        """The atom for a <= 1/2: a - 1 is far from 0, and the terms vanish with a."""
        power_T = a * (log_p_T - log_q_T)
        value_T = _difference(log_q_T + power_T, log_q_T, power_T) - a * difference(log_p_T, log_q_T)
        return (value_T / (a * (a - 1))).clamp_min(0.0)

    at_zero = 1 / alpha if alpha > 0 else math.inf
    slope = 1 / (1 - alpha) if alpha < 1 else math.inf
    # Exchanging pi and mu turns a into 1 - a, so that the branch above serves a close to 1 as well.
    if alpha <= 0.5:
        return Generator(lambda log_pi_T, log_mu_T: small_alpha(alpha, log_pi_T, log_mu_T), at_zero, slope)
    return Generator(lambda log_pi_T, log_mu_T: small_alpha(1 - alpha, log_mu_T, log_pi_T), at_zero, slope)


_KL_FORWARD = Generator(_kl_forward, math.inf, 1.0)
_KL_REVERSE = Generator(_kl_reverse, 1.0, math.inf)
_LIMITS = {0.0: _KL_FORWARD, 1.0: _KL_REVERSE}

GENERATORS: dict[str, Generator | Callable[[float], Generator]] = {
    "tv": Generator(_total_variation, 0.5, 0.5),  # |r - 1| / 2
    "kl_fwd": _KL_FORWARD,  # r - 1 - log r: KL(mu || pi)
    "kl_rev": _KL_REVERSE,  # r log r - r + 1: KL(pi || mu)
    "js": Generator(_jensen_shannon, 2 * math.log(2), 2 * math.log(2)),  # 2 [r log r - (r + 1) log((r + 1) / 2)]: 4 JS
    "hellinger2": Generator(_hellinger_squared, 2.0, 2.0),  # 2 (sqrt r - 1)^2
    "chi2_pearson": Generator(_chi_squared_pearson, 0.5, math.inf),  # (r - 1)^2 / 2: chi2(pi || mu) / 2
    "chi2_neyman": Generator(_chi_squared_neyman, math.inf, 0.5),  # (r - 1)^2 / (2 r): chi2(mu || pi) / 2
    "alpha": alpha_family,
}


def generator_of(name: str, alpha: float | None = None) -> Generator:
    """The row `name`; a parametrised row needs alpha. Raises ValueError where alpha is missing or has no meaning."""
    row = GENERATORS[name]
    match row, alpha:
        case Generator(), None:
            return row
        case Generator(), _:
            raise ValueError(f"divergence {name!r} has no parameter, got alpha = {alpha}")
        case _, None:
            raise ValueError(f"divergence {name!r} needs alpha")
        case _, _:
            return row(alpha)
