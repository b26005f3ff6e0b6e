"""Statistics of the next token's distribution, from hidden rows and a vocabulary shard of the LM head.

The logits never exist at once: tiles of some rows by some columns are computed, reduced and dropped, and computed again
for the gradient. N: rows, C: rows of a tile, H: hidden size, V: columns of this rank's shard, or of a tile.

Collective over the tensor-parallel group: one all-gather forward, one all-reduce backward.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from gppo_megatron.policy.megatron.head_chunk import (
    Columns,
    OutputGradients,
    TileShape,
    product,
    scratch_of,
    statistics_dtype,
)

SCRATCH_BYTES = 32 * 2**20
"""What the buffers of a tile may take, as long as one column fits."""
ROWS_AT_ONCE = 1024
"""Of a tile: many, for each chunk of rows reads and writes the whole gradient of the weight."""


@dataclass(frozen=True)
class VocabShard:
    """Which tokens this rank's columns stand for: column c is token start + c; tokens from `vocab` on are padding."""

    start: int
    vocab: int
    group: dist.ProcessGroup | None

    def padded_columns(self, columns: int) -> int:
        """How many of the shard's last columns are padding."""
        return min(columns, max(0, self.start + columns - self.vocab))

    @property
    def shards(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: over the shards, in place."""
        if self.shards > 1 and values.numel():
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: every shard's `values`, in a new first dimension P; equal on all of them."""
        if self.shards == 1 or not values.numel():
            return values.expand(self.shards, *values.shape)
        gathered = values.new_empty(self.shards * values.numel())
        dist.all_gather_into_tensor(gathered, values.reshape(-1), group=self.group)
        return gathered.view(self.shards, *values.shape)


class TokenStatistics(NamedTuple):
    """Of each row's distribution p over the true vocabulary; float32 (float64 where the hidden rows are).

    logprobs_N: log-probability (nats) of each label. logsumexp_N: of the logits over the temperature.
    entropy_N: in nats. squares_N: sum of p^2, the probability that two samples agree.
    Without gradient: top_logits_N, the largest logit over the temperature, and top_logprobs_N, log max p. A token's
    log-probability is (logit - top_logits) + top_logprobs, which does not round away how far from certain it is, as
    logit - logsumexp would.
    """

    logprobs_N: torch.Tensor
    logsumexp_N: torch.Tensor
    entropy_N: torch.Tensor
    squares_N: torch.Tensor
    top_logits_N: torch.Tensor
    top_logprobs_N: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Megatron's schedules ask a model with experts for that of its output."""
        return self.logprobs_N.device


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
    `shard.vocab`. rows_at_once: C; the columns of a tile are what then fits in SCRATCH_BYTES.
    All is in float32 (float64 where the hidden rows are), whatever the factors of the products: see `product`.
    """
    tile = tile_that_fits(rows_at_once or min(ROWS_AT_ONCE, len(hidden_NH)), weight_VH)
    outputs = _FusedHead.apply(hidden_NH, weight_VH, labels_N, shard, temperature, tile)  # type: ignore[no-untyped-call]
    return TokenStatistics(*outputs)


def tile_that_fits(rows: int, weight_VH: torch.Tensor) -> TileShape:
    """As many columns as fit in SCRATCH_BYTES; at least one.

    >>> tile_that_fits(1024, torch.empty(1, 2048))  # two buffers in float32: 8 bytes a logit
    TileShape(rows=1024, columns=4096)
    >>> tile_that_fits(1024, torch.empty(1, 2048, dtype=torch.bfloat16))  # and the tile's weight in float32
    TileShape(rows=1024, columns=2048)
    """
    rows = max(1, rows)
    scratch = scratch_of(weight_VH.device, weight_VH.dtype)
    return TileShape(rows, max(1, SCRATCH_BYTES // scratch.column_bytes(rows, weight_VH)))


def _columns(
    weight_VH: torch.Tensor, labels_N: torch.Tensor, shard: VocabShard, temperature: float, tile: TileShape
) -> Columns:
    columns = len(weight_VH) - shard.padded_columns(len(weight_VH))
    return Columns(weight_VH[:columns], labels_N, shard.start, temperature, tile)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_N: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        tile: TileShape,
    ) -> tuple[torch.Tensor, ...]:
        columns = _columns(weight_VH, labels_N, shard, temperature, tile)
        sums = _Sums(*shard.gather(_sums_of_this_shard(hidden_NH, columns)).unbind(1)).over_parts()
        log_total_N = sums.total.log()
        logprobs_N, top_logprobs_N = sums.label - log_total_N, -log_total_N
        entropy_N = log_total_N - sums.weighted / sums.total
        squares_N = sums.squares / sums.total.square()
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N, sums.highest, top_logprobs_N, entropy_N, squares_N)
        ctx.shard, ctx.temperature, ctx.tile = shard, temperature, tile
        ctx.main_grad_VH = getattr(weight_VH, "main_grad", None)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sums.highest, top_logprobs_N)
        return logprobs_N, sums.highest + log_total_N, entropy_N, squares_N, sums.highest, top_logprobs_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The logits' gradient, tile by tile, straight into those of hidden rows and weight."""
        hidden_NH, weight_VH, labels_N, top_logits_N, top_logprobs_N, entropy_N, squares_N = _saved(ctx)
        columns = _columns(weight_VH, labels_N, ctx.shard, ctx.temperature, ctx.tile)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient_NH = torch.zeros_like(hidden_NH) if wants_hidden else None
        weight_gradient = _WeightGradient(weight_VH, ctx.main_grad_VH, entropy_N.dtype) if wants_weight else None
        scratch = scratch_of(weight_VH.device, weight_VH.dtype)(columns)
        saved = top_logits_N, top_logprobs_N, entropy_N, squares_N
        for rows in columns.row_chunks():
            given = OutputGradients.of(gradients, saved, rows)
            sum_CH = torch.zeros_like(hidden_NH[rows], dtype=entropy_N.dtype) if wants_hidden else None
            for some, tile in columns.column_chunks():
                gradient_CV = scratch.gradient(hidden_NH[rows], tile, rows, given)
                if weight_gradient is not None:
                    weight_gradient.add(some, gradient_CV, hidden_NH[rows])
                if sum_CH is not None:
                    product(gradient_CV, tile.weight_VH, sum_CH, keep=True)
            if sum_CH is not None and hidden_gradient_NH is not None:
                hidden_gradient_NH[rows] = sum_CH
        if hidden_gradient_NH is not None:
            ctx.shard.sum(hidden_gradient_NH)
        weight_gradient_VH = None if weight_gradient is None else weight_gradient.for_autograd()
        return hidden_gradient_NH, weight_gradient_VH, None, None, None, None


class _WeightGradient:
    """Adds up the weight's gradient over tiles: in `main_grad` where Megatron's DDP keeps one of the summing dtype."""

    def __init__(self, weight_VH: torch.Tensor, main_grad_VH: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._weight_VH = weight_VH
        self._in_place = main_grad_VH is not None and main_grad_VH.dtype == dtype
        self._sum_VH = main_grad_VH if self._in_place else torch.zeros_like(weight_VH, dtype=dtype)

    def add(self, columns: slice, gradient_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
        """gradient_CV: of the logits of these columns."""
        assert self._sum_VH is not None
        product(gradient_CV.t(), hidden_CH, self._sum_VH[columns], keep=True)

    def for_autograd(self) -> torch.Tensor:
        """What is still to be added by whoever adds up gradients: nothing, where `main_grad` has it already.

        Nothing is a sparse zero of no size. None would not do: DDP's hook waits for a gradient before it starts to
        reduce a bucket. DDP adds what it gets to `main_grad`, so a tied embedding's own gradient may join it.
        """
        assert self._sum_VH is not None
        if not self._in_place:
            return self._sum_VH.to(self._weight_VH.dtype)
        nowhere = self._weight_VH.new_empty((2, 0), dtype=torch.int64)
        nothing = self._weight_VH.new_empty(0)
        return torch.sparse_coo_tensor(nowhere, nothing, self._weight_VH.shape, check_invariants=False)


def _saved(ctx: Any) -> tuple[torch.Tensor, ...]:
    """The saved tensors. Raises RuntimeError where an earlier backward has freed them."""
    try:
        return ctx.saved_tensors  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise RuntimeError(
            "backward through the head a second time: its buffers are freed by the first one; add up all that is to be "
            "differentiated and call backward once, or call token_statistics again"
        ) from error


class _Sums(NamedTuple):
    """Of each row, with e = exp(z - highest): the highest logit z; the sums of e, of e (z - highest), of e^2; and the
    label's z - highest, -inf where the label is elsewhere. [N], or [P, N] with one entry a part of the columns."""

    highest: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor
    squares: torch.Tensor
    label: torch.Tensor

    def over_parts(self) -> "_Sums":
        """[P, N] -> [N]: each part's sums moved from its own highest logit to the common one, and added up."""
        highest_N = self.highest.amax(0)
        # A shard without columns has sums of 0 and a highest logit of -inf: it has nothing to shift.
        shift_PN = torch.where(self.highest.isneginf(), 0.0, self.highest - highest_N)
        scale_PN = shift_PN.exp()
        return _Sums(
            highest_N,
            (scale_PN * self.total).sum(0),
            (scale_PN * (self.weighted + shift_PN * self.total)).sum(0),
            (scale_PN.square() * self.squares).sum(0),
            (self.label + shift_PN).amax(0),
        )


def _sums_of_this_shard(hidden_NH: torch.Tensor, columns: Columns) -> torch.Tensor:
    """[5, N], in the order of `_Sums`."""
    dtype = statistics_dtype(hidden_NH.dtype)
    sums_5N = hidden_NH.new_zeros((5, len(hidden_NH)), dtype=dtype)
    sums_5N[[0, 4]] = -torch.inf
    scratch = scratch_of(columns.weight_VH.device, columns.weight_VH.dtype)(columns)
    for rows in columns.row_chunks():
        of_tiles_P5C = [scratch.sums(hidden_NH[rows], tile, rows) for _, tile in columns.column_chunks()]
        sums_5N[:, rows] = torch.stack(_Sums(*torch.stack(of_tiles_P5C).unbind(1)).over_parts())
    return sums_5N
