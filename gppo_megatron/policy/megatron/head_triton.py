"""The head's chunk on a GPU: one pass over the logits for the statistics, one for their gradient, in Triton.

Unverified on hardware: it has run in Triton's interpreter alone. Imported only where `triton` is installed.
The logits are float32. Their gradient is in the weight's dtype, as its products take it: in their place where that is
float32, else in a second buffer.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from gppo_megatron.policy.megatron.head_chunk import Columns, OutputGradients, product, shaped, widened_bytes

TILE = 1024
"""Columns that a kernel handles at a time: a power of two."""


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(
    logits: Any, places: Any, sums: Any, row_stride: Any, rows: Any, columns: Any, temperature: Any, TILE: tl.constexpr
) -> None:
    """One row a program: the numbers of `Scratch.sums`, moved to the highest logit so far, tile by tile."""
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * row_stride
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    squares = tl.zeros((), tl.float32)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        inside = column < columns
        z = tl.div_rn(tl.load(first + column, mask=inside, other=float("-inf")), temperature)
        top = tl.maximum(highest, tl.max(z, 0))
        # Before the first tile there is nothing to move.
        shift = tl.where(start == 0, 0.0, highest - top)
        scale = tl.exp(shift)
        below = tl.where(inside, z - top, 0.0)
        e = tl.where(inside, tl.exp(below), 0.0)
        weighted = scale * (weighted + shift * total) + tl.sum(e * below, 0)
        total = scale * total + tl.sum(e, 0)
        squares = scale * scale * squares + tl.sum(e * e, 0)
        highest = top
    label = tl.div_rn(tl.load(first + tl.load(places + row)), temperature) - highest
    tl.store(sums + row, highest)
    tl.store(sums + rows + row, total)
    tl.store(sums + 2 * rows + row, weighted)
    tl.store(sums + 3 * rows + row, squares)
    tl.store(sums + 4 * rows + row, label)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(
    logits: Any, gradients: Any, places: Any, of_rows: Any, row_stride: Any, rows: Any, columns: Any, temperature: Any,
    TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of one row a program; `gradients` may be `logits`. of_rows: the six numbers of `gradient`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < columns
    place = row * row_stride + column
    top = tl.load(of_rows + row)
    top_logprob = tl.load(of_rows + rows + row)
    constant = tl.load(of_rows + 2 * rows + row)
    of_entropy = tl.load(of_rows + 3 * rows + row)
    of_squares = tl.load(of_rows + 4 * rows + row)
    of_label = tl.load(of_rows + 5 * rows + row)
    z = tl.div_rn(tl.load(logits + place, mask=inside, other=0.0), temperature)
    logprob = (z - top) + top_logprob
    prob = tl.exp(logprob)
    gradient = prob * (constant - of_entropy * logprob + 2.0 * of_squares * prob)
    gradient += tl.where(column == tl.load(places + row), of_label, 0.0)
    tl.store(gradients + place, tl.div_rn(gradient, temperature).to(gradients.dtype.element_ty), mask=inside)


class TritonScratch:
    """The logits in float32, and of a 16-bit weight their gradient, [C, V] each; a `head_chunk.Scratch`."""

    @staticmethod
    def column_bytes(rows: int, weight_VH: torch.Tensor) -> int:
        narrow = weight_VH.dtype.itemsize if weight_VH.dtype.itemsize < 4 else 0
        return rows * (4 + narrow) + widened_bytes(weight_VH)

    def __init__(self, columns: Columns) -> None:
        weight_VH = columns.weight_VH
        size = min(columns.tile.rows, len(columns.labels_N)) * min(columns.tile.columns, len(weight_VH))
        self._logits_buffer = weight_VH.new_empty(size, dtype=torch.float32)
        same = weight_VH.dtype == torch.float32
        self._gradient_buffer = self._logits_buffer if same else weight_VH.new_empty(size)

    def _logits(self, hidden_CH: torch.Tensor, tile: Columns) -> torch.Tensor:
        logits_CV = shaped(self._logits_buffer, (len(hidden_CH), len(tile.weight_VH)))
        return product(hidden_CH, tile.weight_VH.t(), logits_CV)

    def sums(self, hidden_CH: torch.Tensor, tile: Columns, rows: slice) -> torch.Tensor:
        logits_CV = self._logits(hidden_CH, tile)
        count, columns = logits_CV.shape
        sums_5C = logits_CV.new_empty((5, count))
        _sums_kernel[(count,)](
            logits_CV, tile.places(rows), sums_5C, logits_CV.stride(0), count, columns, tile.temperature, TILE=TILE
        )
        sums_5C[4, ~tile.mine(rows)] = -torch.inf
        return sums_5C

    def gradient(self, hidden_CH: torch.Tensor, tile: Columns, rows: slice, given: OutputGradients) -> torch.Tensor:
        logits_CV = self._logits(hidden_CH, tile)
        count, columns = logits_CV.shape
        zeros_C = torch.zeros_like(given.constant_C)
        of_rows_6C = torch.stack(
            [
                given.top_logits_C, given.top_logprobs_C, given.constant_C,
                zeros_C if given.entropy_C is None else given.entropy_C,
                zeros_C if given.squares_C is None else given.squares_C,
                torch.where(tile.mine(rows), given.label_C, 0.0),
            ]
        )  # fmt: skip
        gradient_CV = shaped(self._gradient_buffer, (count, columns))
        _gradient_kernel[(count, triton.cdiv(columns, TILE))](
            logits_CV, gradient_CV, tile.places(rows), of_rows_6C, logits_CV.stride(0), count, columns,
            tile.temperature, TILE=TILE,
        )  # fmt: skip
        return gradient_CV
