"""Which layer's output is the first that is not finite: asked once a gradient is not."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Place(NamedTuple):
    """A part of the model; places compare in the order in which a token passes them."""

    order: int
    name: str


def places(chunks: Sequence[Any]) -> Iterator[tuple[Place, torch.nn.Module]]:
    """The parts of this process's GPT models whose outputs are hidden states; layers are counted from 1."""
    for chunk in chunks:
        model = chunk.module
        if model.pre_process:
            yield Place(0, "the embedding"), model.embedding
        for layer in model.decoder.layers:
            yield Place(layer.layer_number, f"layer {layer.layer_number}"), layer
        if model.decoder.final_layernorm is not None:
            yield Place(sys.maxsize, "the final norm"), model.decoder.final_layernorm


def first_not_finite(chunks: Sequence[Any], forward: Callable[[], object]) -> Place | None:
    """Collective over the world: run `forward`, a pass of these models; the first place of any process whose output is
    not finite, None where all are finite."""
    found: list[Place] = []
    with ExitStack() as hooks:
        for place, module in places(chunks):
            hook = module.register_forward_hook(partial(_look, found, place))
            hooks.callback(hook.remove)
        forward()
    of_all: list[list[Place]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, found)
    return min((place for of_one in of_all for place in of_one), default=None)


def _look(found: list[Place], place: Place, module: torch.nn.Module, arguments: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    if not hidden.isfinite().all():
        found.append(place)
