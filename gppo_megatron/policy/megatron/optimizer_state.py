"""An optimizer's state by the parameters it belongs to, in the words of no layout.

Megatron-Core has an optimizer for experts that are shared out and one for all else, and each may be shared among the
replicas: how many there are, and which options each has, follows from the run and its schedule and is not stored. What
is: of each parameter the two moments, its float32 copy where it is narrower itself, and the number of steps taken.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""How Megatron-Core lays an optimizer's state out for every other layout to read. It writes into what it is given."""

SHARED_COPY, COPY = "optimizer.state.param.", "optimizer.state.fp32_param."
"""Keys of float32 copies: as a distributed optimizer names them, and as others do and all are stored."""

State = dict[str, Any]


def optimizer_state(optimizer: Any, weights: State, loading: bool) -> State:
    """The part of this process that belongs to `weights`. loading: make room for what will be read."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if loading:
        _let_states_load()
        for part in parts:
            # A distributed optimizer that has not stepped has no state to describe.
            make_room = getattr(part, "_init_optimizer_states_with_dummy_values", None)
            if make_room is not None:
                make_room()
    held = [part.sharded_state_dict(weights, is_loading=loading, metadata=dict(RESHARDABLE)) for part in parts]
    moments = {place: stored for place, leaf in _leaves(held) if (stored := _stored(leaf, optimizer)) is not None}
    if loading:
        return {"moments": moments, "held": LocalNonpersistentObject(held)}
    (steps,) = {_steps(each) for each in held}
    return {"moments": moments, "steps": steps}


def load_optimizer(optimizer: Any, read: Mapping[str, Any]) -> None:
    """Put what was read for `optimizer_state(loading=True)` into the optimizer."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, (part, held) in enumerate(zip(parts, read["held"], strict=True)):
        state = _filled(held, read["moments"], str(number))
        _set_steps(state, read["steps"], part.optimizer)
        part.load_state_dict(state)


def _stored(leaf: object, optimizer: Any) -> ShardedBase | None:
    """None where the run knows it: float32 weights need no copy, and all else is no state of a parameter."""
    if not isinstance(leaf, ShardedBase):
        return None
    if not leaf.key.startswith(SHARED_COPY):
        return leaf
    return replace(leaf, key=COPY + leaf.key.removeprefix(SHARED_COPY)) if optimizer.config.bf16 else None


def _leaves(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """With the path to each, such as `1.state.0.exp_avg`."""
    if not isinstance(node, dict | list):
        yield place.removeprefix("."), node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(value, f"{place}.{key}")


def _filled(node: Any, read: Mapping[str, Any], place: str) -> Any:
    """A copy with what was read instead of the descriptions of it; without those that are not stored."""
    if isinstance(node, LocalNonpersistentObject):
        return node.unwrap()
    if isinstance(node, list):
        return [_filled(value, read, f"{place}.{index}") for index, value in enumerate(node)]
    if isinstance(node, dict):
        filled = {key: _filled(value, read, f"{place}.{key}") for key, value in node.items()}
        return {key: value for key, value in filled.items() if not isinstance(value, ShardedBase)}
    return read.get(place, node)


def _steps(held: State) -> int:
    """That one of Megatron's optimizers took: noted in each group or, of torch's Adam, once beside the moments."""
    inner = held.get("optimizer", held)
    counted = [group["step"] for group in inner["param_groups"] if "step" in group]
    return int(inner.get("state", {}).get("common_step", max(counted, default=0)))


def _set_steps(state: State, steps: int, adam: object) -> None:
    inner = state.get("optimizer", state)
    if "state" in inner and isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        inner["state"]["common_step"] = torch.tensor(float(steps))
        return
    for group in inner["param_groups"]:
        group["step"] = steps


@functools.cache
def _let_states_load() -> None:
    """What a distributed optimizer of Megatron-Core expects to read although no checkpoint has it.

    Without Transformer Engine or Apex, Adam is torch's, which keeps a step for each parameter: one that loads in 0.16
    would leave all parameters one tensor for it, which each of them would count up. A float32 weight is its own copy.
    """
    original: Callable[..., None] = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, parameter: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        weight = self.optimizer.param_groups[group]["params"][place]
        state = self.optimizer.state[weight]
        if isinstance(state.get("step"), torch.Tensor) and "step" not in tensors:
            state["step"] = state["step"].clone()
            tensors = {**tensors, "step": state["step"]}
        original(self, parameter, {"param": weight, **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
