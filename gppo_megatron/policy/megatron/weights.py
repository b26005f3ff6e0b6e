"""The policy's parameters in, through the mapping table."""

from typing import NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.mapping.table import EMBEDDING, HEAD, Rule, rules
from gppo_megatron.policy.megatron.model import named_buffers, named_parameters


def load(model: list[DistributedDataParallel], architecture: Architecture, source: HfReader) -> None:
    """Fill this rank's parameters from a Hugging Face folder.

    Raises CheckpointError listing tensors that are missing, not part of the model, of another shape or damaged.
    """
    table = rules(architecture)
    _check_names(source, table, architecture)
    _check_parameters(model, table, architecture)
    wrong: list[str] = []
    for name, parameter in named_parameters(model):
        rule = _rule_of(name, table, architecture)
        size, rank = _place(rule)
        tensors = [source.read(hf_name) for hf_name in rule.hf]
        problems = _tensor_problems(rule, tensors, parameter.shape, size)
        wrong += problems
        if not problems:
            with torch.no_grad():
                parameter.copy_(rule.layout.shard(tensors, size, rank))
    if wrong:
        raise CheckpointError(f"{source.folder}: the tensors do not fit config.json; {'; '.join(_shortened(wrong))}")
    damaged = [name for name, parameter in named_parameters(model) if not parameter.isfinite().all()]
    if damaged:
        raise CheckpointError(f"{source.folder}: NaN or infinity in {', '.join(damaged)}; the weights are damaged")


class Place(NamedTuple):
    """This rank among those that a parameter is cut over."""

    size: int
    rank: int


def _place(rule: Rule) -> Place:
    if rule.expert is None:
        return Place(
            parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
        )
    return Place(
        parallel_state.get_expert_tensor_parallel_world_size(), parallel_state.get_expert_tensor_parallel_rank()
    )


def _check_parameters(model: list[DistributedDataParallel], table: dict[str, Rule], architecture: Architecture) -> None:
    """A buffer that would be saved holds learned numbers as a parameter does: both need a rule."""
    names = [name for name, _ in named_parameters(model)]
    names += [name for name, tensor in named_buffers(model) if tensor.is_floating_point()]
    unknown = sorted(name for name in names if name not in table and not (architecture.tied and name == HEAD))
    if unknown:
        raise CheckpointError(f"the mapping table has no rule for {', '.join(_shortened(unknown))}")


def _check_names(source: HfReader, table: dict[str, Rule], architecture: Architecture) -> None:
    wanted = {hf_name for rule in table.values() for hf_name in rule.hf}
    allowed = wanted | ({"lm_head.weight"} if architecture.tied else set())
    # Some older folders store these; they follow from rope_theta.
    allowed |= {name for name in source.names if name.endswith(".rotary_emb.inv_freq")}
    problems = [
        f"{what}: {', '.join(_shortened(sorted(names)))}"
        for what, names in (
            ("missing", wanted - source.names),
            ("not part of this model", source.names - allowed),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"{source.folder}: the tensors do not fit config.json; {'; '.join(problems)}")


def _tensor_problems(rule: Rule, tensors: list[torch.Tensor], part: torch.Size, size: int) -> list[str]:
    """Tensors that are not what `size` parts of shape `part` merge to, or hold no floating numbers."""
    expected = rule.layout.merge([torch.empty(part, device="meta")] * size)
    problems = [
        f"{name} has the shape {list(tensor.shape)} instead of {list(like.shape)}"
        for name, tensor, like in zip(rule.hf, tensors, expected, strict=True)
        if tensor.shape != like.shape
    ]
    kinds = zip(rule.hf, tensors, strict=True)
    return problems + [f"{name} holds {t.dtype}, no floating numbers" for name, t in kinds if not t.is_floating_point()]


def _shortened(items: list[str], shown: int = 5) -> list[str]:
    """The first few, the last of them with the count of the others."""
    rest = len(items) - shown
    return items if rest <= 0 else [*items[: shown - 1], f"{items[shown - 1]} and {rest} more"]


def _rule_of(name: str, table: dict[str, Rule], architecture: Architecture) -> Rule:
    """A tied model's last pipeline stage keeps its own copy of the embedding as its head."""
    return table[EMBEDDING if architecture.tied and name == HEAD else name]
