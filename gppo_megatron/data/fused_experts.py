"""Experts have two forms in the Hugging Face world: three matrices for each, the files' usual form, and two tensors
over all experts of a layer, which transformers keeps in memory and files may hold too. Everything here uses the first.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


class ExpertSlice(NamedTuple):
    """One expert's matrix: tensor[expert, rows] of the fused tensor, under its own name."""

    name: str
    expert: int
    rows: slice


def is_fused(name: str) -> bool:
    """Whether this is the name of a tensor over all experts of a layer."""
    return name.endswith((GATE_UP, DOWN))


def expert_slices(name: str, shape: Sequence[int]) -> Iterator[ExpertSlice]:
    """What the fused tensor `name` holds: [experts, gate rows then up rows, in], or [experts, out, in].

    >>> [each.name for each in expert_slices("a.mlp.experts.down_proj", (2, 8, 4))]
    ['a.mlp.experts.0.down_proj.weight', 'a.mlp.experts.1.down_proj.weight']
    """
    experts, rows = shape[0], shape[1]
    stem = name.rpartition(".")[0]
    parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    if name.endswith(DOWN):
        parts = {"down_proj": slice(0, rows)}
    for expert in range(experts):
        for part, where in parts.items():
            yield ExpertSlice(f"{stem}.{expert}.{part}.weight", expert, where)


def one_expert_at_a_time(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts of a fused tensor as views into it; any other tensor as it is."""
    if not is_fused(name):
        yield name, tensor
        return
    for part in expert_slices(name, tensor.shape):
        yield part.name, tensor[part.expert, part.rows]
