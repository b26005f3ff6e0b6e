"""Run under two processes: log-prob, entropy and their gradient from shards of one set of logits, against the whole.

The vocabulary of 11 is padded to 14, so the second shard of 7 columns ends in 3 padded ones.
"""

import torch
import torch.distributed as dist

from gppo_megatron.policy.megatron.head import VocabShard, token_statistics

ROWS, VOCAB, COLUMNS, TEMPERATURE = 6, 11, 7, 0.7


def main() -> None:
    dist.init_process_group("gloo")
    start = COLUMNS * dist.get_rank()
    generator = torch.Generator().manual_seed(4)
    whole = torch.randn(ROWS, 2 * COLUMNS, generator=generator, dtype=torch.float64) * 3
    labels = torch.tensor([0, 6, 7, 10, 3, 9])
    weights = torch.randn(2, ROWS, generator=generator, dtype=torch.float64)

    part = whole[:, start : start + COLUMNS].clone().requires_grad_()
    ours = token_statistics(part, labels, VocabShard(start, VOCAB, dist.group.WORLD), TEMPERATURE)
    (gradient,) = torch.autograd.grad((weights[0] * ours.logprobs_N + weights[1] * ours.entropy_N).sum(), part)

    whole.requires_grad_()
    log_probs = torch.log_softmax(whole[:, :VOCAB] / TEMPERATURE, 1)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    picked = log_probs.gather(1, labels[:, None]).squeeze(1)
    (expected,) = torch.autograd.grad((weights[0] * picked + weights[1] * entropy).sum(), whole)

    torch.testing.assert_close(ours.logprobs_N, picked, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.entropy_N, entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected[:, start : start + COLUMNS], rtol=1e-10, atol=1e-12)
    assert torch.equal(part.detach(), whole.detach()[:, start : start + COLUMNS])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
