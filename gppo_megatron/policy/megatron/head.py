"""Log-prob and entropy from a vocabulary shard of the logits. V: columns of this rank's shard, N: rows.

Collective over the tensor-parallel group: two all-reduces forward, none backward.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class VocabShard:
    """Which tokens this rank's columns stand for: column c is token start + c; tokens from `vocab` on are padding."""

    start: int
    vocab: int
    group: dist.ProcessGroup | None

    def padded_columns(self, columns: int) -> int:
        """How many of the shard's last columns are padding."""
        return min(columns, max(0, self.start + columns - self.vocab))


class TokenStatistics(NamedTuple):
    """logprobs_N: log-probability (nats) of each label; entropy_N: entropy (nats) of each row. float32."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor


def token_statistics(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, shard: VocabShard, temperature: float
) -> TokenStatistics:
    """Statistics of softmax(logits / temperature) over the true vocabulary; `logits_NV` is left as it was.

    logits_NV: any floating dtype; computed in float32 (float64 stays float64). labels_N: int64, global token ids.
    """
    return TokenStatistics(*_VocabParallelStatistics.apply(logits_NV, labels_N, shard, temperature))  # type: ignore[no-untyped-call]


class _VocabParallelStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, shard: VocabShard, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = logits_NV.shape[1]
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        scaled_NV = logits_NV.to(dtype, copy=True).div_(temperature)
        padded = shard.padded_columns(columns)
        scaled_NV[:, columns - padded :] = -torch.inf
        highest_N = _reduce(scaled_NV.amax(dim=1), dist.ReduceOp.MAX, shard.group)
        scaled_NV -= highest_N[:, None]

        local_N = labels_N - shard.start
        mine_N = (local_N >= 0) & (local_N < columns)
        local_N = torch.where(mine_N, local_N, 0)
        label_N = torch.where(mine_N, scaled_NV.gather(1, local_N[:, None]).squeeze(1), 0.0)
        weights_NV = scaled_NV.exp()
        # exp(-inf) * -inf is NaN; a padded column adds nothing to the mean logit.
        weighted_NV = torch.where(weights_NV > 0, weights_NV * scaled_NV, 0.0)
        sums_3N = torch.stack([weights_NV.sum(1), weighted_NV.sum(1), label_N])
        total_N, weighted_N, label_N = _reduce(sums_3N, dist.ReduceOp.SUM, shard.group)

        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        log_probs_NV = scaled_NV.sub_(log_total_N[:, None])
        ctx.save_for_backward(log_probs_NV, local_N, mine_N, entropy_N)
        ctx.temperature, ctx.dtype = temperature, logits_NV.dtype
        return label_N - log_total_N, entropy_N

    @staticmethod
    def backward(
        ctx: Any, logprob_gradient_N: torch.Tensor, entropy_gradient_N: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        """d logp / d z = 1[label] - p and d H / d z = -p (log p + H), both over the temperature."""
        log_probs_NV, local_N, mine_N, entropy_N = ctx.saved_tensors
        probs_NV = log_probs_NV.exp()
        surprise_NV = torch.where(probs_NV > 0, log_probs_NV, 0.0) + entropy_N[:, None]
        gradient_NV = -probs_NV * (logprob_gradient_N[:, None] + entropy_gradient_N[:, None] * surprise_NV)
        label_gradient_N = torch.where(mine_N, logprob_gradient_N, 0.0)
        gradient_NV.scatter_add_(1, local_N[:, None], label_gradient_N[:, None])
        return gradient_NV.div_(ctx.temperature).to(ctx.dtype), None, None, None


def _reduce(values: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=operation, group=group)
    return values
