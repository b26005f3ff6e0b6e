"""Run under 1, 2 or 4 processes: the fused head on shards of one weight, values and gradients, against the whole.

Shards have 7 columns, so a vocabulary of 11 leaves the second one with 3 padded columns, and one of 6 with padding
alone. In some cases the shards' logits lie further apart than exp can reach. In float64, and in fewer bits.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gppo_megatron.objective.divergences import generator_of
from gppo_megatron.objective.presets import DIVERGENCES
from gppo_megatron.policy.megatron.divergence import HeadRows, Tile, exact_divergence, pick, top_tokens
from gppo_megatron.policy.megatron.head import TokenStatistics, VocabShard, token_statistics

ROWS, COLUMNS, WIDTH, TEMPERATURE = 6, 7, 4, 0.7
SIZES = (2.0, 5.0, 15.0)
"""Of logits."""


def whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab: int) -> TokenStatistics:
    logits = hidden @ weight[:vocab].t() / TEMPERATURE
    log_probs = torch.log_softmax(logits, 1)
    probs = log_probs.exp()
    return TokenStatistics(
        log_probs.gather(1, labels[:, None]).squeeze(1),
        torch.logsumexp(logits, 1),
        -(probs * log_probs).sum(1),
        probs.square().sum(1),
        logits.amax(1),
        log_probs.amax(1),
    )


class Counted:
    """A collective, with the number of its calls."""

    def __init__(self, collective: Callable[..., Any]) -> None:
        self.calls, self._collective = 0, collective

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self._collective(*arguments, **options)


def count_collectives() -> tuple[Counted, Counted]:
    """All-reduces and all-gathers, from here on."""
    dist.all_reduce, dist.all_gather_into_tensor = Counted(dist.all_reduce), Counted(dist.all_gather_into_tensor)
    return dist.all_reduce, dist.all_gather_into_tensor


def check(vocab: int, labels: list[int], rows_at_once: int | None, lift: float, counted: Sequence[Counted]) -> None:
    """lift: added to the logits of the first shard's tokens."""
    rows = len(labels)
    start = COLUMNS * dist.get_rank()
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    hidden[:, 0] = 1
    weight = torch.randn(COLUMNS * dist.get_world_size(), WIDTH, generator=generator, dtype=torch.float64) * 3
    weight[:COLUMNS, 0] += lift
    mix = torch.randn(4, rows, generator=generator, dtype=torch.float64)
    labels_N = torch.tensor(labels, dtype=torch.int64)

    our_hidden = hidden.clone().requires_grad_()
    part = weight[start : start + COLUMNS].clone().requires_grad_()
    shard = VocabShard(start, vocab, dist.group.WORLD)
    before = [counter.calls for counter in counted]
    ours = token_statistics(our_hidden, part, labels_N, shard, TEMPERATURE, rows_at_once)
    shards = dist.get_world_size() > 1 and rows > 0
    assert [counter.calls - old for counter, old in zip(counted, before, strict=True)] == [0, shards]
    of_hidden, of_part = torch.autograd.grad((mix * torch.stack(ours[:4])).sum(), (our_hidden, part))
    assert [counter.calls - old for counter, old in zip(counted, before, strict=True)] == [shards, shards]

    hidden.requires_grad_()
    weight.requires_grad_()
    expected = whole(hidden, weight, labels_N, vocab)
    expected_hidden, expected_weight = torch.autograd.grad((mix * torch.stack(expected[:4])).sum(), (hidden, weight))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_hidden, expected_hidden, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(of_part, expected_weight[start : start + COLUMNS], rtol=1e-10, atol=1e-11)
    assert rows == 0 or expected_hidden.abs().max() > 0.1


def check_rounded(
    vocab: int, labels: list[int], rows_at_once: int | None, size: float, dtype: torch.dtype, summed: bool
) -> None:
    """Values and gradients from inputs of fewer bits, against float64 autograd of the same inputs.

    Relative to a tensor's largest: 1e-5 in float32, 1e-2 for bfloat16 inputs. size: of the logits. summed: into a
    float32 `main_grad`.
    """
    bound = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    start = COLUMNS * dist.get_rank()
    generator = torch.Generator().manual_seed(6)
    hidden = (torch.randn(ROWS, WIDTH, generator=generator) * size / WIDTH**0.5).to(dtype).requires_grad_()
    weight = torch.randn(COLUMNS * dist.get_world_size(), WIDTH, generator=generator).to(dtype)
    mix = torch.randn(4, ROWS, generator=generator)
    part = weight[start : start + COLUMNS].clone().requires_grad_()
    if summed:
        part.main_grad = torch.zeros_like(part, dtype=torch.float32)  # type: ignore[attr-defined]
    shard = VocabShard(start, vocab, dist.group.WORLD)
    ours = token_statistics(hidden, part, torch.tensor(labels), shard, TEMPERATURE, rows_at_once)
    (mix * torch.stack(ours[:4])).sum().backward()
    doubles = hidden.detach().double().requires_grad_(), weight.double().requires_grad_()
    expected = whole(*doubles, torch.tensor(labels), vocab)
    (mix * torch.stack(expected[:4])).sum().backward()
    of_part = part.main_grad if summed else part.grad  # type: ignore[attr-defined]
    pairs = [*zip(ours, expected, strict=True), (hidden.grad, doubles[0].grad)]
    for value, double in [*pairs, (of_part, doubles[1].grad[start : start + COLUMNS])]:
        largest = doubles[1].grad.abs().max() if value is of_part else double.abs().max()
        assert (value.double() - double).abs().max() <= bound * largest, (dtype, value, double)


def check_divergences(
    vocab: int, tile: Tile | None, size: float, dtype: torch.dtype, counted: Sequence[Counted]
) -> None:
    """Two policies' divergences and one's likeliest tokens from shards, against float64 over the whole vocabulary.

    size: of the logits; the larger, the smaller the step between the policies. Relative to the largest: 1e-11 in
    float64; for float32 and bfloat16 inputs alike 1e-5 at size 2, and 1e-2 where float32 rounds large logits.
    """
    bound = 1e-11 if dtype == torch.float64 else 1e-5 if size == SIZES[0] else 1e-2
    start, count = COLUMNS * dist.get_rank(), 4
    shard = VocabShard(start, vocab, dist.group.WORLD)
    generator = torch.Generator().manual_seed(9)
    hiddens = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64) * size / WIDTH**0.5
    hiddens[1] = hiddens[0] + 0.4 / size * hiddens[1]
    weight = torch.randn(COLUMNS * dist.get_world_size(), WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocab, (ROWS,), generator=generator)
    hiddens, weight = hiddens.to(dtype), weight.to(dtype)
    part = weight[start : start + COLUMNS]
    pi, mu = (
        HeadRows(hidden, part, labels, shard, TEMPERATURE, torch.arange(ROWS)).distribution(
            token_statistics(hidden, part, labels, shard, TEMPERATURE)
        )
        for hidden in hiddens
    )
    log_pi, log_mu = torch.log_softmax(hiddens.double() @ weight[:vocab].double().t() / TEMPERATURE, 2)

    before = [counter.calls for counter in counted]
    shards = dist.get_world_size() > 1
    ids = top_tokens(mu, count, tile)
    assert [counter.calls - old for counter, old in zip(counted, before, strict=True)] == [0, shards]
    picked = pick(pi, ids, labels, tile)
    assert [counter.calls - old for counter, old in zip(counted, before, strict=True)] == [shards, 2 * shards]
    if dtype == torch.float64:
        assert torch.equal(ids, log_mu.topk(count, dim=1).indices)
    torch.testing.assert_close(picked.logprobs_NK.double(), log_pi.gather(1, ids), rtol=bound, atol=bound)
    taken = torch.cat([ids, labels[:, None]], 1)
    rest = log_pi.scatter(1, taken, -torch.inf).logsumexp(1)
    torch.testing.assert_close(picked.rest_N.double(), rest, rtol=bound, atol=bound)
    for name, alpha in [(name, None) for name in DIVERGENCES if name != "alpha"] + [("alpha", 0.3), ("alpha", 1.7)]:
        f = generator_of(name, alpha)
        before = [counter.calls for counter in counted]
        ours = exact_divergence(f, pi, mu, tile)
        assert [counter.calls - old for counter, old in zip(counted, before, strict=True)] == [shards, 0]
        theirs = f.atomic(log_pi, log_mu).sum(1)
        assert (ours - theirs).abs().max() <= bound * theirs.abs().max(), (name, ours, theirs)


def main() -> None:
    dist.init_process_group("gloo")
    counted = count_collectives()
    whole_vocab = COLUMNS * dist.get_world_size()
    for rows_at_once in (1, 4, None):
        check(6, [0, 5, 2, 3, 3, 1], rows_at_once, 0.0, counted)
        check(6, [0, 5, 2, 3, 3, 1], rows_at_once, -2000.0, counted)
        check(6, [3], rows_at_once, 0.0, counted)
        check(6, [], rows_at_once, 0.0, counted)
        check(whole_vocab, [0, 6, whole_vocab - 1, whole_vocab // 2, 3, 5], rows_at_once, 0.0, counted)
        if whole_vocab > 11:
            check(11, [0, 6, 7, 10, 3, 9], rows_at_once, 0.0, counted)
            check(11, [0, 6, 7, 10, 3, 9], rows_at_once, 2000.0, counted)
        vocab, labels = (11, [0, 6, 7, 10, 3, 9]) if whole_vocab > 11 else (6, [0, 5, 2, 3, 3, 1])
        for dtype, size in itertools.product((torch.float32, torch.bfloat16), SIZES):
            check_rounded(vocab, labels, rows_at_once, size, dtype, summed=rows_at_once == 4)
    for vocab in {6, whole_vocab - 2}:
        narrow = itertools.product((torch.float32, torch.bfloat16), SIZES)
        for dtype, size in [(torch.float64, SIZES[0]), *narrow]:
            for tile in (None, Tile(1, 2), Tile(4, 3)):
                check_divergences(vocab, tile, size, dtype, counted)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
