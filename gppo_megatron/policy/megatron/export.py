"""The policy's parameters out: every Hugging Face tensor in full, on every rank, for files and for weight sync."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.api import NamedTensor
from gppo_megatron.policy.megatron.mapping.table import Rule, rules
from gppo_megatron.policy.megatron.model import named_parameters

BUCKET_BYTES = 256 * 2**20
"""Of a rank's parts; the tensors in full come one at a time."""

Read = Callable[[torch.nn.Parameter], torch.Tensor]
Held = dict[str, tuple[tuple[int, ...], torch.dtype]]


def value_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter's value; one that Transformer Engine keeps in FP8 comes dequantized."""
    detached = parameter.detach()
    return dequantize_fp8_tensor(detached) if is_float8tensor(detached) else detached


@dataclass(frozen=True)
class PlannedTensor:
    """Where one Megatron parameter lives: its pipeline stage, its expert-parallel rank (None: every one), and the
    shape and dtype of a rank's part."""

    rule: Rule
    stage: int
    expert_rank: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def home(self) -> tuple[int, int | None, torch.dtype]:
        """What tensors that travel together have in common."""
        return self.stage, self.expert_rank, self.dtype


def cut_buckets(plan: Sequence[PlannedTensor], most_bytes: int) -> list[tuple[PlannedTensor, ...]]:
    """The whole plan in order: neighbours of one home, together at most `most_bytes` unless one alone has more."""
    buckets: list[tuple[PlannedTensor, ...]] = []
    for _, neighbours in groupby(plan, key=lambda planned: planned.home):
        bucket: list[PlannedTensor] = []
        for planned in neighbours:
            if bucket and sum(each.bytes for each in bucket) + planned.bytes > most_bytes:
                buckets.append(tuple(bucket))
                bucket = []
            bucket.append(planned)
        buckets.append(tuple(bucket))
    return buckets


class WeightExporter:
    """Walks the whole model in the table's order. The plan is made once, so collectives can't get out of order."""

    def __init__(
        self, model: list[DistributedDataParallel], architecture: Architecture, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Collective. Raises CheckpointError where a parameter is nowhere, or ranks disagree on the plan."""
        self._parameters = {named.name: named.parameter for named in named_parameters(model)}
        self._stages = parallel_state.get_pipeline_model_parallel_group()
        self._experts = parallel_state.get_expert_model_parallel_group()
        plan = self._plan(architecture)
        self.digest = hashlib.sha256(repr(plan).encode()).hexdigest()
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, self.digest)
        if len(set(digests)) > 1:
            raise CheckpointError(f"processes disagree on the model's parameters: plans {', '.join(digests)}")
        self._buckets = cut_buckets(plan, bucket_bytes)

    def _plan(self, architecture: Architecture) -> list[PlannedTensor]:
        here: Held = {name: (tuple(p.shape), p.dtype) for name, p in self._parameters.items()}
        held_by: list[Held] = [{}] * self._stages.size()
        dist.all_gather_object(held_by, here, group=self._stages)
        experts_here = architecture.experts.count // self._experts.size() if architecture.experts else 1
        plan = []
        for name, rule in rules(architecture).items():
            expert_rank, sibling = None, name
            if rule.expert is not None:
                # Another rank's expert looks like the one that has its place on this rank.
                expert_rank = rule.expert // experts_here
                own = self._experts.rank() * experts_here + rule.expert % experts_here
                sibling = name.replace(f".experts.{rule.expert}.", f".experts.{own}.")
            stages = [stage for stage, held in enumerate(held_by) if sibling in held]
            if not stages:
                raise CheckpointError(f"{name}: no process holds this parameter")
            plan.append(PlannedTensor(rule, stages[0], expert_rank, *held_by[stages[0]][sibling]))
        return plan

    def __call__(self, read: Read = value_of, dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
        """Collective: every Hugging Face tensor in full, on every rank; consume it to the end.

        read: what to export of each parameter: its value, or anything of its shape, such as its gradient.
        dtype: of what `read` gives, where that is not the parameter's own.
        """
        for bucket in self._buckets:
            flat_parts = self._from_all_shards(bucket, read, dtype or bucket[0].dtype)
            offset = 0
            for planned in bucket:
                end = offset + torch.Size(planned.shape).numel()
                parts = [flat[offset:end].view(planned.shape) for flat in flat_parts]
                for name, tensor in zip(planned.rule.hf, planned.rule.layout.merge(parts), strict=True):
                    yield NamedTensor(name, tensor)
                offset = end

    def _from_all_shards(self, bucket: tuple[PlannedTensor, ...], read: Read, dtype: torch.dtype) -> list[torch.Tensor]:
        """The bucket as every tensor-parallel rank holds it, flat, in rank order."""
        shards = (
            parallel_state.get_tensor_model_parallel_group()
            if bucket[0].expert_rank is None
            else parallel_state.get_expert_tensor_parallel_group()
        )
        mine = self._on_every_stage(bucket, read, dtype)
        if shards.size() == 1:
            return [mine]
        parts = [torch.empty_like(mine) for _ in range(shards.size())]
        dist.all_gather(parts, mine, group=shards)
        return parts

    def _on_every_stage(self, bucket: tuple[PlannedTensor, ...], read: Read, dtype: torch.dtype) -> torch.Tensor:
        """This tensor-parallel rank's part of the bucket, flat, from the expert-parallel rank and the stage that own
        it."""
        stage, expert_rank, _ = bucket[0].home
        at_home = self._stages.rank() == stage
        if at_home and expert_rank in (None, self._experts.rank()):
            flat = torch.cat([read(self._parameters[planned.rule.megatron]).reshape(-1) for planned in bucket])
            assert flat.dtype == dtype, f"{flat.dtype} was read, but {dtype} is to be sent"
        else:
            count = sum(torch.Size(planned.shape).numel() for planned in bucket)
            flat = torch.empty(count, dtype=dtype, device=torch.cuda.current_device())
        if at_home and expert_rank is not None and self._experts.size() > 1:
            dist.broadcast(flat, dist.get_global_rank(self._experts, expert_rank), group=self._experts)
        if self._stages.size() > 1:
            dist.broadcast(flat, dist.get_global_rank(self._stages, stage), group=self._stages)
        return flat
