"""How a Megatron parameter is made of Hugging Face tensors and cut over tensor-parallel ranks: pure and exact.

Each layout is two linear maps, inverse to one another, so gradients map as weights do:
`shard` (Hugging Face tensors -> one rank's part) and `merge` (all ranks' parts -> Hugging Face tensors).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Tensors = Sequence[torch.Tensor]


class Layout(Protocol):
    """size: tensor-parallel ranks; rank: 0 to size - 1; parts come in rank order."""

    def shard(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor: ...

    def merge(self, parts: Tensors) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class Replicated:
    """One tensor, whole on every rank."""

    def shard(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        (tensor,) = tensors
        return tensor

    def merge(self, parts: Tensors) -> tuple[torch.Tensor, ...]:
        return (parts[0],)


@dataclass(frozen=True)
class Cut:
    """One tensor cut in equal parts along `dim`."""

    dim: int

    def shard(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        (tensor,) = tensors
        return tensor.chunk(size, self.dim)[rank]

    def merge(self, parts: Tensors) -> tuple[torch.Tensor, ...]:
        return (torch.cat(list(parts), self.dim),)


@dataclass(frozen=True)
class GateUp:
    """[gate; up], each cut on its own: rank i holds [gate_i; up_i]."""

    def shard(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])

    def merge(self, parts: Tensors) -> tuple[torch.Tensor, ...]:
        halves = [part.chunk(2) for part in parts]
        return tuple(torch.cat([half[side] for half in halves]) for side in (0, 1))


@dataclass(frozen=True)
class GroupedQkv:
    """q, k and v rows interleaved a key-value head at a time: [its query heads; k; v], then cut in equal parts.

    With more ranks than key-value heads a part holds some of one head's rows: Megatron gathers the products before it
    picks a rank's own.
    """

    kv_heads: int
    head_dim: int

    def shard(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        rest = tensors[0].shape[1:]
        grouped = torch.cat([t.reshape(self.kv_heads, -1, *rest) for t in tensors], dim=1)
        return grouped.reshape(-1, *rest).chunk(size)[rank]

    def merge(self, parts: Tensors) -> tuple[torch.Tensor, ...]:
        rest = parts[0].shape[1:]
        grouped = torch.cat(list(parts)).reshape(self.kv_heads, -1, *rest)
        query_rows = grouped.shape[1] - 2 * self.head_dim
        pieces = torch.split(grouped, [query_rows, self.head_dim, self.head_dim], dim=1)
        return tuple(piece.reshape(-1, *rest) for piece in pieces)


@dataclass(frozen=True)
class VocabRows:
    """A row a token, padded with zero rows until every rank holds as many, then cut."""

    vocab: int

    def shard(self, tensors: Tensors, size: int, rank: int) -> torch.Tensor:
        (tensor,) = tensors
        padding = -self.vocab % size
        padded = torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]) if padding else tensor
        return padded.chunk(size)[rank]

    def merge(self, parts: Tensors) -> tuple[torch.Tensor, ...]:
        return (torch.cat(list(parts))[: self.vocab],)
