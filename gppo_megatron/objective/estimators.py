"""How much of a divergence is seen: one function an estimator.

For one generator, 0 <= atomic <= binary <= top_k <= the exact divergence; mc is unbiased under mu and bounded by
nothing. The first three read the sampled token's two log-probabilities alone; top_k reads those of K more tokens.
"""

import math
from collections.abc import Callable

import torch

from gppo_megatron.objective.divergences import LOG_RATIO_LIMIT, Generator

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


def token_estimates(
    generator: Generator, log_pi_T: torch.Tensor, log_mu_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`mc`, `atomic` and `binary` at once: on few tokens the number of operations is what costs."""
    log_ratio_T = (log_pi_T - log_mu_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    own_2T = torch.stack([log_pi_T, log_mu_T])
    pi_3T, mu_3T = torch.stack(
        [torch.stack([log_ratio_T, torch.zeros_like(log_ratio_T)]), own_2T, log_complement(own_2T)], 1
    )
    mc_T, atomic_T, rest_T = generator.atomic(pi_3T, mu_3T)
    return mc_T, atomic_T, atomic_T + rest_T


def top_k(
    generator: Generator,
    log_pi_T: torch.Tensor,
    log_mu_T: torch.Tensor,
    log_pi_TK: torch.Tensor,
    log_mu_TK: torch.Tensor,
    counted_TK: torch.Tensor,
    log_pi_rest_T: torch.Tensor,
    log_mu_rest_T: torch.Tensor,
) -> torch.Tensor:
    """The divergence of the distribution {the sampled token, each of K others, all the rest as one}.

    log_pi_T, log_mu_T: the sampled token's. counted_TK: bool, False where a place is empty or the sampled token itself.
    log_pi_rest_T, log_mu_rest_T: what is left besides all of these, -inf where nothing is.
    """
    others_T = torch.where(counted_TK, generator.atoms(log_pi_TK, log_mu_TK), 0.0).sum(-1)
    return generator.atoms(log_pi_T, log_mu_T) + others_T + generator.atoms(log_pi_rest_T, log_mu_rest_T)


def exact(generator: Generator, log_pi_TV: torch.Tensor, log_mu_TV: torch.Tensor) -> torch.Tensor:
    """The divergence itself, from all V log-probabilities of both; a part of it from a part of them."""
    return generator.atoms(log_pi_TV, log_mu_TV).sum(-1)


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
