"""A collective of each group before anything depends on it: a wrong network shows at once, and by name."""

import socket
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gppo_megatron.errors import GppoError
from gppo_megatron.types import Team

ELEMENTS = 1 << 16


def preflight(device: torch.device, world: Team) -> str:
    """Collective: sum and gather known numbers over every group of this process; a line that tells what was tried.

    Raises GppoError, on every process, naming the groups and ranks whose numbers came back wrong.
    """
    start = time.perf_counter()
    groups = {
        "all processes": dist.group.WORLD,
        "tensor": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "data": parallel_state.get_data_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "expert": parallel_state.get_expert_model_parallel_group(),
    }
    wrong = []
    for name, group in groups.items():
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1 and (problem := _try(ranks, group, device)):
            wrong.append(f"{name} {ranks}: {problem}")
    hosts: list[tuple[str, list[str]]] = world.gather((socket.gethostname(), wrong))
    problems = [f"rank {rank} ({host}): {problem}" for rank, (host, found) in enumerate(hosts) for problem in found]
    if problems:
        raise GppoError("the network between the processes gives wrong numbers; " + "; ".join(problems))
    nodes = sorted({host for host, _ in hosts})
    return (
        f"preflight  {world.size} processes on {len(nodes)} node{'s' * (len(nodes) > 1)} ({', '.join(nodes[:4])}"
        f"{', ...' * (len(nodes) > 4)}) agree, in {time.perf_counter() - start:.2f} s"
    )


def _try(ranks: list[int], group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """What is wrong with this group's sums or gathers."""
    mine = torch.full((ELEMENTS,), float(dist.get_rank() + 1), device=device)
    total = mine.clone()
    dist.all_reduce(total, group=group)
    expected = float(sum(rank + 1 for rank in ranks))
    if not bool((total == expected).all()):
        return f"the sum of rank + 1 came out as {float(total[0]):g} instead of {expected:g}"
    parts = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(parts, mine, group=group)
    for rank, part in zip(ranks, parts, strict=True):
        if not bool((part == rank + 1).all()):
            return f"gathering got {float(part[0]):g} from rank {rank} instead of {rank + 1}"
    return None
