"""The policy's parameters in and out, always through the mapping table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.api import NamedTensor
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.mapping.table import EMBEDDING, HEAD, Rule, rules
from gppo_megatron.policy.megatron.model import named_parameters


def load(model: list[DistributedDataParallel], architecture: Architecture, source: HfReader) -> None:
    """Fill this rank's parameters from a Hugging Face folder.

    Raises CheckpointError listing tensors that are missing, not part of the model, of another shape or damaged.
    """
    table = rules(architecture)
    _check_names(source, table, architecture)
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    wrong: list[str] = []
    for name, parameter in named_parameters(model):
        rule = _rule_of(name, table, architecture)
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


@dataclass(frozen=True)
class PlannedTensor:
    """Where one Megatron parameter lives: its owning pipeline stage and the shape of a rank's part."""

    rule: Rule
    stage: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightExporter:
    """Walks the whole model in the table's order. The plan is made once, so collectives can't get out of order."""

    def __init__(self, model: list[DistributedDataParallel], architecture: Architecture) -> None:
        """Collective."""
        self._parameters = {named.name: named.parameter for named in named_parameters(model)}
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._shards = parallel_state.get_tensor_model_parallel_group()
        here = {name: (tuple(p.shape), p.dtype) for name, p in self._parameters.items()}
        held_by: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}] * self._stages.size()
        dist.all_gather_object(held_by, here, group=self._stages)
        self._plan = []
        for name, rule in rules(architecture).items():
            stage = next(stage for stage, held in enumerate(held_by) if name in held)
            self._plan.append(PlannedTensor(rule, stage, *held_by[stage][name]))

    def __call__(
        self, read: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach
    ) -> Iterator[NamedTensor]:
        """Collective: every Hugging Face tensor in full, on every rank; consume it to the end.

        read: what to export of each parameter: its value, or anything of its shape, such as its gradient.
        """
        for planned in self._plan:
            part = self._on_every_stage(planned, read)
            parts = [torch.empty_like(part) for _ in range(self._shards.size())]
            dist.all_gather(parts, part, group=self._shards)
            for name, tensor in zip(planned.rule.hf, planned.rule.layout.merge(parts), strict=True):
                yield NamedTensor(name, tensor)

    def _on_every_stage(
        self, planned: PlannedTensor, read: Callable[[torch.nn.Parameter], torch.Tensor]
    ) -> torch.Tensor:
        """This tensor-parallel rank's part of the parameter, broadcast from the stage that owns it."""
        if self._stages.rank() == planned.stage:
            part = read(self._parameters[planned.rule.megatron]).contiguous()
        else:
            part = torch.empty(planned.shape, dtype=planned.dtype, device=torch.cuda.current_device())
        if self._stages.size() > 1:
            dist.broadcast(part, dist.get_global_rank(self._stages, planned.stage), group=self._stages)
        return part
