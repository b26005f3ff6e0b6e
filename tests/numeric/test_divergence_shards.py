"""Divergences from the head against float64 over the whole vocabulary; the ladder of estimators."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from gppo_megatron.objective import estimators
from gppo_megatron.objective.divergences import Generator, generator_of
from gppo_megatron.objective.presets import DIVERGENCES
from gppo_megatron.policy.megatron import head
from gppo_megatron.policy.megatron.divergence import (
    Distribution,
    HeadRows,
    Tile,
    exact_divergence,
    pick,
    top_tokens,
)
from gppo_megatron.policy.megatron.head import VocabShard, token_statistics
from tests.numeric.test_head import MostRows

ROWS = [(name, None) for name in DIVERGENCES if name != "alpha"]
ROWS += [("alpha", alpha) for alpha in (-1.5, -0.5, 0.25, 0.5, 1.001, 1.5, 2.5)]
FORMULAS = {
    "tv": lambda r: (r - 1).abs() / 2,
    "kl_fwd": lambda r: r - 1 - r.log(),
    "kl_rev": lambda r: r * r.log() - r + 1,
    "js": lambda r: 2 * (r * r.log() - (r + 1) * ((r + 1) / 2).log()),
    "hellinger2": lambda r: 2 * (r.sqrt() - 1) ** 2,
    "chi2_pearson": lambda r: (r - 1) ** 2 / 2,
    "chi2_neyman": lambda r: (r - 1) ** 2 / (2 * r),
}


def whole(name: str, alpha: float | None, pi: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """sum_v mu f(pi / mu), in float64, from the definition."""
    ratio = pi / mu
    f = (ratio**alpha - alpha * ratio + alpha - 1) / (alpha * (alpha - 1)) if alpha else FORMULAS[name](ratio)
    return (mu * f).sum(-1)


class Pair(NamedTuple):
    """Two policies: rows and heads; labels [N]; the vocabulary, padding left out."""

    hidden: torch.Tensor
    weight: torch.Tensor
    past_hidden: torch.Tensor
    past_weight: torch.Tensor
    labels: torch.Tensor
    vocab: int
    temperature: float

    def to(self, dtype: torch.dtype) -> "Pair":
        return Pair(*(value.to(dtype) for value in self[:4]), *self[4:])

    def probabilities(self) -> tuple[torch.Tensor, torch.Tensor]:
        """pi and mu over the whole vocabulary, in float64, from products that are not rounded."""
        logits = (
            (hidden.double() @ weight.double().t())[:, : self.vocab] / self.temperature
            for hidden, weight in ((self.hidden, self.weight), (self.past_hidden, self.past_weight))
        )
        pi, mu = (torch.softmax(values, 1) for values in logits)
        return pi, mu

    def distributions(self) -> tuple[Distribution, Distribution]:
        shard = VocabShard(0, self.vocab, None)
        rows = HeadRows(self.hidden, self.weight, self.labels, shard, self.temperature, torch.arange(len(self.labels)))
        past = replace(rows, hidden_NH=self.past_hidden, weight_VH=self.past_weight)
        pi, mu = (
            each.distribution(token_statistics(each.hidden_NH, each.weight_VH, each.labels_N, shard, self.temperature))
            for each in (rows, past)
        )
        return pi, mu


def pair_of(rows: int, vocab: int, padding: int, seed: int, step: float = 0.3, scale: float = 2.0) -> Pair:
    """step: how far the second policy is from the first, relative to its logits of size `scale`."""
    generator = torch.Generator().manual_seed(seed)
    width = 5
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale / math.sqrt(width)
    weight = torch.randn(vocab + padding, width, generator=generator, dtype=torch.float64)
    past_hidden = hidden + step * torch.randn(hidden.shape, generator=generator, dtype=torch.float64)
    past_weight = weight + step * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (rows,), generator=generator)
    return Pair(hidden, weight, past_hidden, past_weight, labels, vocab, 0.8)


def top_k_of(generator: Generator, pair: Pair, count: int, tile: Tile | None = None) -> torch.Tensor:
    """As the policy works it out, the sampler being the second policy."""
    pi, mu = pair.distributions()
    ids = top_tokens(mu, count, tile)
    of_mu, of_pi = pick(mu, ids, pair.labels, tile), pick(pi, ids, pair.labels, tile)
    chosen = torch.log(pair.probabilities()[0]), torch.log(pair.probabilities()[1])
    log_pi, log_mu = (values.gather(1, pair.labels[:, None]).squeeze(1).to(of_mu.rest_N.dtype) for values in chosen)
    counted = (ids >= 0) & (ids != pair.labels[:, None])
    return estimators.top_k(
        generator, log_pi, log_mu, of_pi.logprobs_NK, of_mu.logprobs_NK, counted, of_pi.rest_N, of_mu.rest_N
    )


def pooled(pair: Pair, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """pi and mu of {the label, the others of mu's top `count`, the rest}: a merged bucket a row, in float64."""
    pi, mu = pair.probabilities()
    keep = torch.zeros_like(mu, dtype=torch.bool)
    keep.scatter_(1, mu.topk(min(count, pair.vocab), dim=1).indices, True)
    keep.scatter_(1, pair.labels[:, None], True)
    rests = ((p * ~keep).sum(1, keepdim=True) for p in (pi, mu))
    # A ratio of 1 for what is no bucket of its own.
    return tuple(
        torch.cat([torch.where(keep, p, 1.0), rest.where((~keep).any(1, keepdim=True), torch.ones(()).double())], 1)
        for p, rest in zip((pi, mu), rests, strict=True)
    )


@pytest.mark.parametrize(("name", "alpha"), ROWS)
@given(
    rows=st.integers(1, 6), vocab=st.integers(2, 9), padding=st.integers(0, 3), count=st.integers(1, 11),
    tile=st.sampled_from([None, Tile(1, 1), Tile(2, 3), Tile(4, 2), Tile(9, 99)]), seed=st.integers(0, 10_000),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_values_in_float64(
    name: str, alpha: float | None, rows: int, vocab: int, padding: int, count: int, tile: Tile | None, seed: int
) -> None:
    pair = pair_of(rows, vocab, padding, seed)
    generator = generator_of(name, alpha)
    pi, mu = pair.distributions()
    assert_close(
        exact_divergence(generator, pi, mu, tile), whole(name, alpha, *pair.probabilities()), rtol=1e-9, atol=1e-12
    )
    expected = whole(name, alpha, *pooled(pair, count))
    assert_close(top_k_of(generator, pair, count, tile), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "alpha"), ROWS)
@given(
    vocab=st.integers(2, 12),
    count=st.integers(1, 6),
    step=st.sampled_from([0.01, 0.3, 1.0]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=15, deadline=None)
def test_the_ladder_of_estimators(
    name: str, alpha: float | None, vocab: int, count: int, step: float, seed: int
) -> None:
    """0 <= atomic <= binary <= top-K <= exact for every sampled token, and the mean of mc under mu is the exact one."""
    pair = pair_of(1, vocab, 0, seed, step)
    generator = generator_of(name, alpha)
    pi, mu = pair.probabilities()
    assume(min(pi.min(), mu.min()) > 1e-6)  # or log(1 - p) cannot be told from log p, and mc saturates
    every = torch.arange(vocab)
    pair = pair._replace(
        hidden=pair.hidden.expand(vocab, -1), past_hidden=pair.past_hidden.expand(vocab, -1), labels=every
    )
    exact = exact_divergence(generator, *pair.distributions())
    log_pi, log_mu = pi[0].log(), mu[0].log()
    ladder = [
        torch.zeros(vocab, dtype=torch.float64),
        estimators.atomic(generator, log_pi, log_mu),
        estimators.binary(generator, log_pi, log_mu),
        top_k_of(generator, pair, count),
        exact,
    ]
    for lower, upper in zip(ladder, ladder[1:], strict=False):
        assert (upper - lower >= -1e-9 * exact - 1e-13).all(), (name, lower, upper)
    mean = (mu[0] * estimators.mc(generator, log_pi, log_mu)).sum()
    assert mean.item() == pytest.approx(exact[0].item(), rel=1e-9, abs=1e-13)


HALF_AN_ULP = 2**-9
"""Of bfloat16, of a number just below 1."""


@pytest.mark.parametrize(
    ("dtype", "size", "step", "tolerance"),
    [
        (torch.float32, 2.0, 0.3, 1e-5),
        (torch.bfloat16, 2.0, 0.3, 1e-5),
        (torch.bfloat16, 5.0, HALF_AN_ULP, 1e-3),
        (torch.bfloat16, 15.0, HALF_AN_ULP, 1e-3),
    ],
)
@pytest.mark.parametrize(("name", "alpha"), ROWS)
def test_values_in_lower_precision(
    name: str, alpha: float | None, dtype: torch.dtype, size: float, step: float, tolerance: float
) -> None:
    """Against float64 on the same rounded inputs, relative to the largest; logits of that size, and a small step."""
    pair = pair_of(30, 400, 7, 1, step, size).to(dtype)
    assert not torch.equal(pair.hidden, pair.past_hidden)
    generator = generator_of(name, alpha)
    exact = exact_divergence(generator, *pair.distributions(), Tile(8, 100))
    top = top_k_of(generator, pair, 20, Tile(8, 100))
    for ours, theirs in (
        (exact, whole(name, alpha, *pair.probabilities())), (top, whole(name, alpha, *pooled(pair, 20)))
    ):  # fmt: skip
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("tile", [None, Tile(3, 4), Tile(1, 1)])
@pytest.mark.parametrize("count", [1, 5, 14])
def test_top_tokens_are_those_of_the_whole_vocabulary(tile: Tile | None, count: int) -> None:
    pair = pair_of(7, 11, 4, 3)
    _, mu = pair.probabilities()
    ids = top_tokens(pair.distributions()[1], count, tile)
    expected = mu.topk(min(count, 11), dim=1).indices
    assert torch.equal(ids[:, :11], expected)
    assert (ids[:, 11:] == -1).all()


@pytest.mark.parametrize(("name", "alpha"), ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_rows_have_no_divergence_and_no_nan(name: str, alpha: float | None, dtype: torch.dtype) -> None:
    """A probability of 1 to the last bit, on both sides, alike and not, for the sampled token and another."""
    logits = torch.tensor([[300.0, 0, -50], [300.0, 0, -50], [0, 300.0, -50], [3e4, -3e4, 0], [0, 0, 0]], dtype=dtype)
    past = torch.tensor([[300.0, 0, -50], [0, 300.0, -50], [300.0, 0, -50], [3e4, -3e4, 0], [0, 0, 0]], dtype=dtype)
    eye = torch.eye(3, dtype=dtype)
    generator = generator_of(name, alpha)
    for label in range(3):
        pair = Pair(logits, eye, past, eye, torch.full((5,), label), 3, 1.0)
        exact = exact_divergence(generator, *pair.distributions())
        assert exact[[0, 3, 4]].tolist() == [0, 0, 0]
        assert (exact[1:3] > 0.4).all()
        pi, mu = pair.distributions()
        for count in (1, 2, 5):
            ids = top_tokens(mu, count)
            of_pi, of_mu = pick(pi, ids, pair.labels), pick(mu, ids, pair.labels)
            own = (d.logprobs(slice(None), slice(label, label + 1)).squeeze(1) for d in (pi, mu))
            counted = (ids >= 0) & (ids != label)
            top = estimators.top_k(
                generator, *own, of_pi.logprobs_NK, of_mu.logprobs_NK, counted, of_pi.rest_N, of_mu.rest_N
            )
            assert top[[0, 3, 4]].abs().max() <= 1e-6
            assert not top.isnan().any()


@pytest.mark.parametrize(("name", "alpha"), ROWS)
def test_a_token_that_one_side_never_draws(name: str, alpha: float | None) -> None:
    """The limits mu f(0) and pi f'(inf), against a ratio far out; infinite where the generator is."""
    generator = generator_of(name, alpha)
    never, log_p = -math.inf, math.log(0.3)
    without_pi, without_mu, neither = generator.atoms(
        torch.tensor([never, log_p, never], dtype=torch.float64),
        torch.tensor([log_p, never, never], dtype=torch.float64),
    ).tolist()
    assert neither == 0
    far = torch.tensor([-600.0], dtype=torch.float64)
    near_pi = generator.atomic(far, torch.tensor([log_p], dtype=torch.float64)).item()
    near_mu = generator.atomic(torch.tensor([log_p], dtype=torch.float64), far).item()
    for limit, value in ((without_pi, near_pi), (without_mu, near_mu)):
        if math.isinf(limit):
            assert value > 50
        else:
            assert value == pytest.approx(limit, rel=1e-6)


def test_a_divergence_that_is_infinite_masks_and_is_no_nan() -> None:
    """A sampler that never draws a token which the policy does: KL(pi || mu) is infinite, and KL(mu || pi) is not."""
    never = torch.tensor([[-math.inf]])
    arguments = (torch.tensor([-1.0]), torch.tensor([-1.1]), torch.tensor([[-2.0]]), never)
    rest = (torch.tensor([-0.7]), torch.tensor([-0.4]))
    counted = torch.tensor([[True]])
    assert estimators.top_k(generator_of("kl_rev"), *arguments, counted, *rest).item() == math.inf
    assert 0 < estimators.top_k(generator_of("kl_fwd"), *arguments, counted, *rest).item() < 1


def test_no_rows_and_one_row() -> None:
    generator = generator_of("js")
    assert exact_divergence(generator, *pair_of(0, 5, 1, 0).distributions()).shape == (0,)
    assert top_k_of(generator, pair_of(0, 5, 1, 0), 3).shape == (0,)
    one = pair_of(1, 5, 1, 0)
    assert_close(exact_divergence(generator, *one.distributions()), whole("js", None, *one.probabilities()))


def test_inputs_are_left_alone_and_nothing_has_a_gradient() -> None:
    pair = pair_of(4, 9, 2, 0)
    leaves = [value.requires_grad_() for value in pair[:4]]
    before = [value.detach().clone() for value in pair[:5]]
    pi, mu = pair.distributions()
    kept = [value.clone() for value in (pi.top_logits_N, pi.top_logprobs_N)]
    ids = top_tokens(mu, 3)
    ids_before = ids.clone()
    results = (exact_divergence(generator_of("tv"), pi, mu), *pick(pi, ids, pair.labels))
    assert not any(value.requires_grad for value in results)
    assert all(map(torch.equal, before, (*leaves, pair.labels)))
    assert all(map(torch.equal, kept, (pi.top_logits_N, pi.top_logprobs_N)))
    assert torch.equal(ids, ids_before)


def test_the_logits_of_all_rows_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "SCRATCH_BYTES", 64 * 4 * 12 * 10)  # tiles of 64 rows by 10 columns
    pair = pair_of(64, 31, 0, 0)
    pi, mu = pair.distributions()
    counts = []
    for run in (
        lambda: exact_divergence(generator_of("js"), pi, mu),
        lambda: top_tokens(mu, 3),
        lambda: pick(pi, torch.zeros(64, 3, dtype=torch.int64), pair.labels),
    ):
        with MostRows(31) as whole_rows, MostRows(10) as tiles:
            run()
        counts.append((whole_rows.rows, tiles.rows))
    assert counts == [(0, 64)] * 3
