"""Run under two processes: the fused head on shards of one weight, values and gradients, against the whole in float64.

Shards have 7 columns, so a vocabulary of 11 leaves the second one with 3 padded columns, and one of 6 with padding
alone. In the last case the two shards' logits lie further apart than exp can reach.
"""

from typing import Any

import torch
import torch.distributed as dist

from gppo_megatron.policy.megatron.head import TokenStatistics, VocabShard, token_statistics

ROWS, COLUMNS, WIDTH, TEMPERATURE = 6, 7, 4, 0.7


def whole(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab: int) -> TokenStatistics:
    logits = hidden @ weight[:vocab].t() / TEMPERATURE
    log_probs = torch.log_softmax(logits, 1)
    probs = log_probs.exp()
    return TokenStatistics(
        log_probs.gather(1, labels[:, None]).squeeze(1),
        torch.logsumexp(logits, 1),
        -(probs * log_probs).sum(1),
        probs.square().sum(1),
    )


class Counted:
    """all_reduce, with the number of its calls."""

    def __init__(self) -> None:
        self.calls, self._all_reduce = 0, dist.all_reduce

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self._all_reduce(*arguments, **options)


def check(vocab: int, labels: list[int], rows_at_once: int | None, lift: float, all_reduce: Counted) -> None:
    """lift: added to the logits of the first shard's tokens."""
    start = COLUMNS * dist.get_rank()
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    hidden[:, 0] = 1
    weight = torch.randn(2 * COLUMNS, WIDTH, generator=generator, dtype=torch.float64) * 3
    weight[:COLUMNS, 0] += lift
    mix = torch.randn(4, ROWS, generator=generator, dtype=torch.float64)

    our_hidden = hidden.clone().requires_grad_()
    part = weight[start : start + COLUMNS].clone().requires_grad_()
    shard = VocabShard(start, vocab, dist.group.WORLD)
    all_reduce.calls = 0
    ours = token_statistics(our_hidden, part, torch.tensor(labels), shard, TEMPERATURE, rows_at_once)
    assert all_reduce.calls == 2
    of_hidden, of_part = torch.autograd.grad((mix * torch.stack(ours)).sum(), (our_hidden, part))
    assert all_reduce.calls == 3

    hidden.requires_grad_()
    weight.requires_grad_()
    expected = whole(hidden, weight, torch.tensor(labels), vocab)
    expected_hidden, expected_weight = torch.autograd.grad((mix * torch.stack(expected)).sum(), (hidden, weight))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_hidden, expected_hidden, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(of_part, expected_weight[start : start + COLUMNS], rtol=1e-10, atol=1e-11)
    assert expected_hidden.abs().max() > 0.1


def main() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce = all_reduce = Counted()
    for rows_at_once in (1, 4, None):
        check(11, [0, 6, 7, 10, 3, 9], rows_at_once, 0.0, all_reduce)
        check(14, [0, 6, 7, 13, 3, 9], rows_at_once, 0.0, all_reduce)
        check(6, [0, 5, 2, 3, 3, 1], rows_at_once, 0.0, all_reduce)
        check(11, [0, 6, 7, 10, 3, 9], rows_at_once, 2000.0, all_reduce)
        check(6, [0, 5, 2, 3, 3, 1], rows_at_once, -2000.0, all_reduce)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
