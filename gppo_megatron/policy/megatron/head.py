"""Statistics of the next token's distribution, from hidden rows and a vocabulary shard of the LM head.

The logits of all rows never exist at once: chunks of rows are computed, reduced and dropped, and computed again for
the gradient. N: rows, C: rows of a chunk, H: hidden size, V: columns of this rank's shard.

Collective over the tensor-parallel group: two all-reduces forward, one backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

SCRATCH_BYTES = 64 * 2**20
"""What the two [C, V] buffers of a chunk may take, as long as one row fits."""


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
    """Of each row's distribution p over the true vocabulary; float32 (float64 where the hidden rows are).

    logprobs_N: log-probability (nats) of each label. logsumexp_N: of the logits over the temperature.
    entropy_N: in nats. squares_N: sum of p^2, the probability that two samples agree.
    """

    logprobs_N: torch.Tensor
    logsumexp_N: torch.Tensor
    entropy_N: torch.Tensor
    squares_N: torch.Tensor


def token_statistics(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    shard: VocabShard,
    temperature: float,
    rows_at_once: int | None = None,
) -> TokenStatistics:
    """Collective: statistics of softmax(hidden @ weight.T / temperature); each can be differentiated, once.

    hidden_NH: equal on all ranks of the group, and so is its gradient. labels_N: int64, global token ids below
    `shard.vocab`. rows_at_once: C; by default what fits in SCRATCH_BYTES.
    Products are in the dtype of the weight; all else, and the sum of the weight's gradient over chunks, in float32.
    """
    rows = rows_at_once or rows_that_fit(len(weight_VH), hidden_NH.dtype)
    outputs = _FusedHead.apply(hidden_NH, weight_VH, labels_N, shard, temperature, rows)  # type: ignore[no-untyped-call]
    return TokenStatistics(*outputs)


def rows_that_fit(columns: int, dtype: torch.dtype) -> int:
    """How many rows of two [C, columns] buffers fit in SCRATCH_BYTES; at least one.

    >>> rows_that_fit(columns=2**15, dtype=torch.bfloat16)  # the buffers are float32: 2 x 4 x 2**15 bytes a row
    256
    """
    return max(1, SCRATCH_BYTES // (2 * _statistics_dtype(dtype).itemsize * columns))


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Columns:
    """The shard's columns that are no padding, and where the labels fall among them."""

    weight_VH: torch.Tensor
    local_N: torch.Tensor
    mine_N: torch.Tensor
    temperature: float
    rows_at_once: int

    def chunks(self) -> Iterator[slice]:
        """None where every column is padding: such a rank adds nothing."""
        if len(self.weight_VH):
            for first in range(0, len(self.local_N), self.rows_at_once):
                yield slice(first, first + self.rows_at_once)

    def logits(self, hidden_CH: torch.Tensor) -> torch.Tensor:
        """[C, V], over the temperature, in a new tensor."""
        product_CV = hidden_CH @ self.weight_VH.t()
        return product_CV.to(_statistics_dtype(product_CV.dtype)).div_(self.temperature)


def _columns(
    weight_VH: torch.Tensor, labels_N: torch.Tensor, shard: VocabShard, temperature: float, rows_at_once: int
) -> _Columns:
    columns = len(weight_VH) - shard.padded_columns(len(weight_VH))
    local_N = labels_N - shard.start
    mine_N = (local_N >= 0) & (local_N < columns)
    return _Columns(weight_VH[:columns], torch.where(mine_N, local_N, 0), mine_N, temperature, rows_at_once)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_N: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        rows_at_once: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        columns = _columns(weight_VH, labels_N, shard, temperature, rows_at_once)
        highest_N, sums_4N = _sums_of_this_shard(hidden_NH, columns)
        top_N = _reduce(highest_N.clone(), dist.ReduceOp.MAX, shard.group)
        # A shard without columns has sums of 0 and a highest logit of -inf: it has nothing to shift.
        shift_N = torch.where(highest_N.isneginf(), 0.0, highest_N - top_N)
        total_N, weighted_N, squares_N, label_N = sums_4N
        scale_N = shift_N.exp()
        label_N = torch.where(columns.mine_N, label_N + shift_N, 0.0)
        weighted_N = scale_N * (weighted_N + shift_N * total_N)
        packed_4N = torch.stack([scale_N * total_N, weighted_N, scale_N.square() * squares_N, label_N])
        total_N, weighted_N, squares_N, label_N = _reduce(packed_4N, dist.ReduceOp.SUM, shard.group)

        log_total_N = total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        squares_N = squares_N / total_N.square()
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N, top_N, log_total_N, entropy_N, squares_N)
        ctx.shard, ctx.temperature, ctx.rows_at_once = shard, temperature, rows_at_once
        ctx.set_materialize_grads(False)
        return label_N - log_total_N, top_N + log_total_N, entropy_N, squares_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The logits' gradient, chunk by chunk, straight into those of hidden rows and weight."""
        hidden_NH, weight_VH, labels_N, top_N, log_total_N, entropy_N, squares_N = ctx.saved_tensors
        columns = _columns(weight_VH, labels_N, ctx.shard, ctx.temperature, ctx.rows_at_once)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        given = _OutputGradients.of(gradients, entropy_N, squares_N)
        hidden_gradient_NH = torch.zeros_like(hidden_NH) if wants_hidden else None
        weight_gradient_VH = torch.zeros_like(weight_VH, dtype=entropy_N.dtype) if wants_weight else None
        for rows in columns.chunks():
            # Subtracted one after the other: their sum would round away how far a near-certain token is from certain.
            logprobs_CV = columns.logits(hidden_NH[rows]).sub_(top_N[rows, None]).sub_(log_total_N[rows, None])
            gradient_CV = given.of_logits(logprobs_CV, rows)
            label_gradient_C = torch.where(columns.mine_N[rows], given.label_N[rows], 0.0)
            gradient_CV.scatter_add_(1, columns.local_N[rows, None], label_gradient_C[:, None])
            gradient_CV.div_(ctx.temperature)
            if hidden_gradient_NH is not None:
                hidden_gradient_NH[rows] = gradient_CV.to(weight_VH.dtype) @ columns.weight_VH
            if weight_gradient_VH is not None:
                hidden_CH = hidden_NH[rows].to(gradient_CV.dtype)
                weight_gradient_VH[: len(columns.weight_VH)].addmm_(gradient_CV.t(), hidden_CH)
            del logprobs_CV, gradient_CV  # one memory; gone before that of the next chunk is taken
        if hidden_gradient_NH is not None:
            _reduce(hidden_gradient_NH, dist.ReduceOp.SUM, ctx.shard.group)
        if weight_gradient_VH is not None:
            weight_gradient_VH = weight_gradient_VH.to(weight_VH.dtype)
        return hidden_gradient_NH, weight_gradient_VH, None, None, None, None


def _sums_of_this_shard(hidden_NH: torch.Tensor, columns: _Columns) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's highest logit z* here, and the sums of e, of e (z - z*) and of e^2 with e = exp(z - z*), and the
    label's z - z* (any number where the label is elsewhere): [N] and [4, N]."""
    dtype = _statistics_dtype(hidden_NH.dtype)
    highest_N = hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=dtype)
    sums_4N = hidden_NH.new_zeros((4, len(hidden_NH)), dtype=dtype)
    for rows in columns.chunks():
        logits_CV = columns.logits(hidden_NH[rows])
        highest_N[rows] = logits_CV.amax(1)
        logits_CV -= highest_N[rows, None]
        sums_4N[3, rows] = logits_CV.gather(1, columns.local_N[rows, None]).squeeze(1)
        weights_CV = logits_CV.exp()
        sums_4N[0, rows] = weights_CV.sum(1)
        sums_4N[1, rows] = logits_CV.mul_(weights_CV).sum(1)
        sums_4N[2, rows] = weights_CV.square_().sum(1)
        del logits_CV, weights_CV  # gone before those of the next chunk are made
    return highest_N, sums_4N


@dataclass(frozen=True)
class _OutputGradients:
    """Of the loss with respect to the statistics; `constant_N` is all that is one number a row.

    With p a row's probabilities: d logprob = 1[label] - p, d logsumexp = p, d entropy = -p (log p + entropy),
    d squares = 2 p (p - squares).
    """

    label_N: torch.Tensor
    constant_N: torch.Tensor
    entropy_N: torch.Tensor | None
    squares_N: torch.Tensor | None

    @classmethod
    def of(
        cls, gradients: tuple[torch.Tensor | None, ...], entropy_N: torch.Tensor, squares_N: torch.Tensor
    ) -> "_OutputGradients":
        """gradients: in the order of TokenStatistics; None for a statistic the loss does not use."""
        zeros_N = torch.zeros_like(entropy_N)
        label_N, logsumexp_N, of_entropy_N, of_squares_N = (
            zeros_N if gradient_N is None else gradient_N for gradient_N in gradients
        )
        constant_N = logsumexp_N - label_N - of_entropy_N * entropy_N - 2 * of_squares_N * squares_N
        return cls(label_N, constant_N, gradients[2], gradients[3])

    def of_logits(self, logprobs_CV: torch.Tensor, rows: slice) -> torch.Tensor:
        """Gradient of the scaled logits without the label's own 1; overwrites `logprobs_CV`."""
        constant_C = self.constant_N[rows, None]
        if self.entropy_N is None and self.squares_N is None:
            return logprobs_CV.exp_().mul_(constant_C)
        probs_CV = logprobs_CV.exp()
        slope_CV = logprobs_CV.mul_(0.0 if self.entropy_N is None else -self.entropy_N[rows, None])
        if self.squares_N is not None:
            slope_CV.addcmul_(probs_CV, 2 * self.squares_N[rows, None])
        return slope_CV.add_(constant_C).mul_(probs_CV)


def _reduce(values: torch.Tensor, operation: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=operation, group=group)
    return values
