"""Process groups: Megatron's own for tensors, gloo teams for small Python values."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from gppo_megatron.config.schema import Parallel
from gppo_megatron.errors import PeerLostError
from gppo_megatron.policy.megatron.platform import adapt
from gppo_megatron.types import Alone, Team

T = TypeVar("T")

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


@dataclass(frozen=True, eq=False)
class GlooTeam:
    """A `Team` over a gloo group; `ranks` are its members' world ranks in order."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.ranks.index(dist.get_rank())

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather(self, value: T) -> list[T]:
        """Collective over the group."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]


@dataclass(frozen=True)
class MegatronTopology:
    """The run's teams; a team of one costs nothing."""

    world: Team
    data: Team
    replica: Team


@contextmanager
def topology(parallel: Parallel, device: torch.device, seed: int, timeout_seconds: float) -> Iterator[MegatronTopology]:
    """Collective: the process groups of this run, torn down at the end.

    Raises PeerLostError when another process is gone, whatever collective notices it.
    """
    adapt(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_seconds)
    complete = False
    try:
        if parallel.processes == 1:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            dist.init_process_group(backend, timeout=timeout)
        minutes = max(1, int(timeout_seconds // 60))
        parallel_state.initialize_model_parallel(
            parallel.tensor, parallel.pipeline, distributed_timeout_minutes=minutes
        )
        # No layer draws random numbers (dropout is 0), so Megatron's tracker may hand out the plain generator.
        tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
        yield MegatronTopology(
            world=_team(range(dist.get_world_size())),
            data=_team(dist.get_process_group_ranks(parallel_state.get_data_parallel_group())),
            replica=_team(dist.get_process_group_ranks(parallel_state.get_model_parallel_group())),
        )
        complete = True
    except RuntimeError as error:
        if any(sign in str(error) for sign in LOST):
            raise PeerLostError(f"process {os.environ.get('RANK', '0')} lost another process: {error}") from error
        raise
    finally:
        # Leaving waits for the other processes, and after an error they may be gone.
        if complete or parallel.processes == 1:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _team(ranks: "range | list[int]") -> Team:
    """Collective over the world: this process's team, while every other process makes its own."""
    mine = tuple(ranks)
    every: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    teams = sorted({members for members in every if len(members) > 1})
    groups = {members: dist.new_group(list(members), backend="gloo") for members in teams}
    return GlooTeam(groups[mine], mine) if mine in groups else Alone()
