"""How much of a divergence the sampled token's two probabilities reveal: one function an estimator.

For one generator, 0 <= atomic <= binary <= the exact divergence; mc is unbiased under mu and bounded by nothing.
"""

import math
from collections.abc import Callable

import torch

from gppo_megatron.objective.divergences import Generator

Estimator = Callable[[Generator, torch.Tensor, torch.Tensor], torch.Tensor]


def mc(generator: Generator, log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    """f(pi / mu): a single-sample Monte Carlo estimate."""
    return generator.mc(log_pi_T - log_mu_T)


def atomic(generator: Generator, log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    """mu f(pi / mu): the sampled token's own term of the divergence."""
    return generator.atomic(log_pi_T, log_mu_T)


def binary(generator: Generator, log_pi_T: torch.Tensor, log_mu_T: torch.Tensor) -> torch.Tensor:
    """The divergence of the two-way distribution {this token, any other}."""
    rest_T = generator.atomic(log_complement(log_pi_T), log_complement(log_mu_T))
    return generator.atomic(log_pi_T, log_mu_T) + rest_T


def log_complement(log_p_T: torch.Tensor) -> torch.Tensor:
    """log(1 - p). A p of 1 counts as the largest probability below 1 that is told apart, see `LARGEST_LOG_PROBABILITY`.

    This keeps both sides finite, so that two certain tokens have divergence 0 and not NaN.
    """
    log_p_T = log_p_T.clamp_max(LARGEST_LOG_PROBABILITY[log_p_T.dtype])
    near_one_T = torch.log(-torch.expm1(log_p_T))
    return torch.where(log_p_T > -math.log(2), near_one_T, torch.log1p(-torch.exp(log_p_T)))


# A float32 log-softmax rounds near 0 to about one eps, and what lies closer is noise. Float64 serves closed forms,
# where every number counts.
LARGEST_LOG_PROBABILITY = {
    torch.float32: -torch.finfo(torch.float32).eps,
    torch.float64: -torch.finfo(torch.float64).tiny,
}

ESTIMATORS: dict[str, Estimator] = {"mc": mc, "atomic": atomic, "binary": binary}
