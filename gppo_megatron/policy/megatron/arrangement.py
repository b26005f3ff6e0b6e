"""How a micro-batch's sequences stand in the tensors that a model sees: end to end, or side by side.

Both pad on the right, where causal attention never looks. Letters: T tokens of the micro-batch, S places and B columns
of this process's grid; under context parallelism a process has its slices of every sequence alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from gppo_megatron.policy.megatron.attention import slices
from gppo_megatron.types import MicroBatch

ELSEWHERE = -1


@dataclass(frozen=True, eq=False)
class Grid:
    """A micro-batch as this process's part of the model sees it; all on the CPU.

    tokens_BS, positions_BS: int64; positions restart with every sequence.
    place_T: int64, where each token's hidden state stands in the flattened [S x B]; ELSEWHERE where another
    context-parallel process has it.
    packed: the sequences' bounds, where B is 1 and they stand end to end.
    """

    tokens_BS: torch.Tensor
    positions_BS: torch.Tensor
    place_T: torch.Tensor
    packed: PackedSeqParams | None

    @property
    def length(self) -> int:
        """Places over all context-parallel processes is `length` x their number."""
        return self.tokens_BS.shape[1]


@dataclass(frozen=True)
class Shares:
    """How sequences are cut: over `context` processes, of which this is number `rank`, then over `tensor` equal parts
    (1 without sequence parallelism), each a multiple of `unit`."""

    context: int = 1
    rank: int = 0
    tensor: int = 1
    unit: int = 1

    @property
    def slices(self) -> int:
        """Every sequence's length is a multiple of it."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def alignment(self) -> int:
        """The whole length is a multiple of it."""
        return self.slices * self.tensor * self.unit


class Arrangement(Protocol):
    """place: the grid of a micro-batch, of at least `at_least` places over all context-parallel processes."""

    def place(self, batch: MicroBatch, at_least: int = 0) -> Grid: ...


@dataclass(frozen=True)
class EndToEnd:
    """Sequences packed one behind the other; B is 1."""

    shares: Shares

    def place(self, batch: MicroBatch, at_least: int = 0) -> Grid:
        padded = [_up(length, self.shares.slices) for length in batch.lengths]
        padded[-1] += _up(max(sum(padded), at_least), self.shares.alignment) - sum(padded)
        places_T = torch.cat(
            [torch.arange(start, start + length) for start, length in zip(_starts(padded), batch.lengths, strict=True)]
        )
        tokens = torch.zeros(sum(padded), dtype=torch.int64).index_put((places_T,), batch.tokens_T)
        positions = torch.cat([torch.arange(length) for length in padded])
        mine = slices(padded, self.shares.context, self.shares.rank)
        bounds = torch.tensor([*_starts(padded), sum(padded)], dtype=torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(padded),
            max_seqlen_kv=max(padded),
        )
        return Grid(tokens[None, mine], positions[None, mine], _inverse(mine, sum(padded))[places_T], packed)


@dataclass(frozen=True)
class SideBySide:
    """A column a sequence, each padded to the longest."""

    shares: Shares

    def place(self, batch: MicroBatch, at_least: int = 0) -> Grid:
        length = _up(max(max(batch.lengths), at_least), self.shares.alignment)
        columns = len(batch.lengths)
        column_T = torch.arange(columns).repeat_interleave(torch.tensor(batch.lengths))
        position_T = torch.cat([torch.arange(length) for length in batch.lengths])
        tokens = torch.zeros(columns, length, dtype=torch.int64).index_put((column_T, position_T), batch.tokens_T)
        mine = slices([length], self.shares.context, self.shares.rank)
        row_T = _inverse(mine, length)[position_T]
        place_T = torch.where(row_T == ELSEWHERE, ELSEWHERE, row_T * columns + column_T)
        return Grid(tokens[:, mine], mine.expand(columns, -1), place_T, None)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths))]


def _inverse(mine: torch.Tensor, total: int) -> torch.Tensor:
    """[total]: at mine[i] stands i, everywhere else ELSEWHERE."""
    return torch.full((total,), ELSEWHERE).index_put((mine,), torch.arange(len(mine)))
