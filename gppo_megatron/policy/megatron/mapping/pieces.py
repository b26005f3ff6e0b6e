"""Where the mapping table's parameters lie in a distributed checkpoint: boxes of tensors that Megatron-Core names."""

import math
from dataclasses import dataclass, replace

from gppo_megatron.policy.megatron.mapping.layouts import Cut, Replicated, VocabRows
from gppo_megatron.policy.megatron.mapping.table import Rule


@dataclass(frozen=True)
class Piece:
    """The box of the checkpoint's tensor `key`, of shape `whole`, that starts at `offsets` and has `sizes`.

    stacked: leading axes, of size 1 here, along which Megatron stacks layers or experts.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    stacked: int

    @property
    def shape(self) -> tuple[int, ...]:
        """As a part of the parameter, the stacked axes taken off."""
        return self.sizes[self.stacked :]

    def part(self, dim: int, size: int, rank: int) -> "Piece":
        """The rank-th of `size` equal parts along axis `dim` of its shape."""
        axis = self.stacked + dim
        length = self.sizes[axis] // size
        offsets = tuple(o + rank * length * (i == axis) for i, o in enumerate(self.offsets))
        return replace(self, offsets=offsets, sizes=tuple(length if i == axis else s for i, s in enumerate(self.sizes)))


@dataclass(frozen=True)
class StoredParameter:
    """One parameter of the table, whole: `pieces` on top of one another, along its first axis.

    alias: a second box that holds the whole, for layers that look for it under another key.
    """

    rule: Rule
    pieces: tuple[Piece, ...]
    alias: Piece | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        first, *rest = (piece.shape for piece in self.pieces)
        return (first[0] + sum(shape[0] for shape in rest), *first[1:])

    @property
    def boxes(self) -> tuple[Piece, ...]:
        """All of them; a checkpoint has `pieces` or `alias`, or both."""
        return self.pieces if self.alias is None else (*self.pieces, self.alias)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def cut_axis(self) -> int | None:
        """The axis that tensor parallelism cuts; None where every rank holds the whole."""
        match self.rule.layout:
            case Replicated():
                return None
            case Cut(dim=dim):
                return dim
            case _:
                return 0

    @property
    def padded(self) -> bool:
        """Whether a checkpoint may hold further rows, which mean nothing."""
        return isinstance(self.rule.layout, VocabRows)


@dataclass(frozen=True)
class StoredLayout:
    """Everything a model's weights are in a distributed checkpoint. objects: keys of pickled values without content."""

    parameters: tuple[StoredParameter, ...]
    objects: tuple[str, ...]
