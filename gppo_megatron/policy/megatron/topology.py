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
from torch.distributed.rendezvous import rendezvous

from gppo_megatron.config.schema import Parallel
from gppo_megatron.errors import PeerLostError
from gppo_megatron.policy.megatron.meeting import fresh_store
from gppo_megatron.policy.megatron.platform import adapt
from gppo_megatron.types import Alone, Team

T = TypeVar("T")

LOST = (
    # gloo, and the store in which processes find one another
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Connection was likely closed",
    # NCCL, unverified: no machine with two GPUs was there to lose one
    "remote process exited or there was a network error",
    "A call failed possibly due to a network error or a remote process exiting prematurely",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
    "Connection closed by remote peer",
)
"""What a collective's error says when another process is gone."""


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
    with world(parallel.processes, device, timeout_seconds), layout(parallel, seed, timeout_seconds) as teams:
        yield teams


@contextmanager
def world(processes: int, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Collective: all processes joined; a process alone needs no address. Raises PeerLostError as `topology` does."""
    adapt(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    complete = False
    try:
        if processes == 1:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            timeout = timedelta(seconds=timeout_seconds)
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            store = fresh_store(store, rank, size, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        yield
        complete = True
    except RuntimeError as error:
        if any(sign in str(error) for sign in LOST):
            raise PeerLostError(f"process {os.environ.get('RANK', '0')} lost another process: {error}") from error
        raise
    finally:
        # Leaving waits for the other processes, and after an error they may be gone.
        if complete or processes == 1:
            dist.destroy_process_group()


@contextmanager
def layout(parallel: Parallel, seed: int, timeout_seconds: float) -> Iterator[MegatronTopology]:
    """Collective: Megatron's groups inside a `world` of `parallel.processes`; one layout may follow another."""
    parallel_state.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages if parallel.virtual_stages > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, int(timeout_seconds // 60)),
    )
    try:
        # No layer draws random numbers (dropout is 0), so Megatron's tracker may hand out the plain generator.
        tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
        teams = MegatronTopology(
            world=_team(range(dist.get_world_size())),
            data=_team(dist.get_process_group_ranks(parallel_state.get_data_parallel_group())),
            replica=_team(_replica()),
        )
        yield teams
        groups = [group for group in parallel_state._global_process_group_list if group is not None]
        groups += [team.group for team in (teams.world, teams.data, teams.replica) if isinstance(team, GlooTeam)]
        for group in dict.fromkeys(groups):  # each has threads of its own, and Megatron only forgets them
            dist.destroy_process_group(group)
    finally:
        parallel_state.destroy_model_parallel()


def _replica() -> list[int]:
    """Collective over the world: the ranks with this one's place among the replicas."""
    places: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(places, parallel_state.get_data_parallel_rank())
    return [rank for rank, place in enumerate(places) if place == parallel_state.get_data_parallel_rank()]


def _team(ranks: "range | list[int]") -> Team:
    """Collective over the world: this process's team, while every other process makes its own."""
    mine = tuple(ranks)
    every: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    teams = sorted({members for members in every if len(members) > 1})
    groups = {members: dist.new_group(list(members), backend="gloo") for members in teams}
    return GlooTeam(groups[mine], mine) if mine in groups else Alone()
