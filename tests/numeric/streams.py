"""Token streams for tests of objectives, and that what is not finite in them stays where it is."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch
from hypothesis import strategies as st

from gppo_megatron.metrics import Max, Mean, Metric
from gppo_megatron.objective.policy_gradient import Objective, TokenLoss, TokenStreams

Numbers = list[float] | torch.Tensor


def streams_of(
    log_pi: Numbers,
    log_mu: Numbers,
    advantages: Numbers,
    mask: list[bool] | None = None,
    dtype: torch.dtype = torch.float64,
    age: list[int] | None = None,
    lengths: tuple[int, ...] = (),
) -> TokenStreams:
    """By default of one sequence; sampler's log-probs .125 below the anchor's, entropy half of -log pi."""
    age_T = torch.zeros(len(log_pi), dtype=torch.int64) if age is None else torch.tensor(age)
    log_pi_T, log_mu_T, advantages_T = (torch.as_tensor(values, dtype=dtype) for values in (log_pi, log_mu, advantages))
    mask_T = torch.ones(len(log_pi_T), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    leaf_T = log_pi_T.clone().requires_grad_()
    return TokenStreams(
        leaf_T, -leaf_T / 2, log_mu_T, log_mu_T - 0.125, advantages_T, age_T, mask_T, lengths or (len(leaf_T),)
    )


def random_streams(seed: int, lengths: tuple[int, ...], spread: float = 0.3, masked: float = 0.2) -> TokenStreams:
    """float64; one advantage a sequence; `masked` of the tokens carry no loss."""
    random = torch.Generator().manual_seed(seed)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, generator=random, dtype=torch.float64)

    total = sum(lengths)
    log_mu_T = torch.nn.functional.logsigmoid(2 * normal(total))
    log_pi_T = torch.minimum(log_mu_T + spread * normal(total), log_mu_T / 100)
    advantages_T = normal(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = (torch.rand(total, generator=random) >= masked).tolist()
    return streams_of(log_pi_T, log_mu_T, advantages_T, mask, lengths=lengths)


def gradient_of(objective: Objective, streams: TokenStreams) -> torch.Tensor:
    """d(sum of the losses) / d(log pi)."""
    (gradient_T,) = torch.autograd.grad(objective(streams).loss_T.sum(), streams.logprobs_T, retain_graph=True)
    return gradient_T


def numbers_of(metrics: dict[str, Metric[torch.Tensor]]) -> dict[str, float]:
    """name -> value."""
    return {name: float(metric.value) for name, metric in metrics.items()}


def assert_finite(result: TokenLoss) -> None:
    """Every metric is made of numbers, but for the largest of nothing."""
    for name, metric in result.metrics.items():
        numbers = [metric.total, metric.weight] if isinstance(metric, Mean) else [metric.value]
        empty = isinstance(metric, Max) and metric.value == -math.inf
        assert all(number.shape == () and not number.requires_grad for number in numbers), name
        assert empty or all(number.isfinite() for number in numbers), name


Poison = tuple[int, str, float]
"""Position, stream, value."""

POISON = st.tuples(
    st.integers(0, 5),
    st.sampled_from(["logprobs_T", "anchor_logprobs_T", "advantages_T", "sampler_logprobs_T", "entropy_T"]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
POISONS = st.lists(POISON, min_size=1, max_size=6)
MASKS = st.lists(st.booleans(), min_size=6, max_size=6)
LENGTHS = (2, 1, 3)
SEQUENCE_OF = (0, 0, 1, 2, 2, 2)


def poisoned(poison: Sequence[Poison], mask: list[bool]) -> tuple[TokenStreams, TokenStreams]:
    """Six float32 tokens as they are, and with the poison."""
    log_pi, log_mu = [-1.0, -2.0, -0.5, -0.1, -3.0, -7.0], [-1.05, -1.5, -0.55, -0.1, -3.5, -6.8]
    clean = streams_of(log_pi, log_mu, [1.0, -1.0, 0.5, -0.5, 2.0, -2.0], mask, torch.float32, lengths=LENGTHS)
    values = {field.name: getattr(clean, field.name) for field in fields(clean)}
    values = {name: value.detach().clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
    for position, stream, value in poison:
        values[stream][position] = value
    values["logprobs_T"].requires_grad_()
    return clean, replace(clean, **values)


def token_by_token(decisive: set[str]) -> Callable[[Sequence[Poison], list[bool]], set[int]]:
    """Positions lost to poison of the decisive streams."""
    return lambda poison, mask: {position for position, stream, _ in poison if stream in decisive}


def by_sequence(decisive: set[str]) -> Callable[[Sequence[Poison], list[bool]], set[int]]:
    """All positions of a sequence that has poison of the decisive streams on a token with loss."""

    def lost(poison: Sequence[Poison], mask: list[bool]) -> set[int]:
        ill = {SEQUENCE_OF[position] for position, stream, _ in poison if stream in decisive and mask[position]}
        return {position for position in range(6) if SEQUENCE_OF[position] in ill}

    return lost


def assert_poison_stays(objective: Objective, poison: Sequence[Poison], mask: list[bool], lost: set[int]) -> TokenLoss:
    """The lost tokens have no loss and no gradient, all others those of the clean streams."""
    clean, ill = poisoned(poison, mask)
    sound_T = torch.tensor([position not in lost for position in range(6)])
    result, gradient_T = objective(ill), gradient_of(objective, ill)
    assert_finite(result)
    for got_T, want_T in [(result.loss_T, objective(clean).loss_T), (gradient_T, gradient_of(objective, clean))]:
        assert torch.equal(got_T, torch.where(sound_T, want_T, 0.0))
        assert (got_T[~clean.mask_T] == 0).all()
    return result
