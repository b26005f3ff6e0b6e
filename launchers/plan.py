"""RunConfig -> the processes to start. Pure: starts nothing, reads nothing from the machine."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gppo_megatron.config.schema import RunConfig
from gppo_megatron.config.server_checks import LAUNCHED

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class ProcessPlan:
    """One process: what to execute, and the environment variables it gets on top of the launcher's own."""

    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]


def plan_processes(config: RunConfig, path: str, overrides: Sequence[str], port: int) -> tuple[ProcessPlan, ...]:
    """The processes of a run on one machine, in rank order.

    path, overrides: what `config` was loaded from; every process loads them again.
    port: a free TCP port, where the processes find one another.
    """
    command = plan_command(("train", path, *overrides), config.parallel.processes, config.threads, port)
    return tuple(replace(plan, environment={**plan.environment, LAUNCHED: "1"}) for plan in command)


def plan_command(arguments: Sequence[str], size: int, threads: int, port: int) -> tuple[ProcessPlan, ...]:
    """`gppo` with these arguments as `size` processes of one machine, in rank order; threads: CPU threads of each."""
    argv = (sys.executable, "-m", "gppo_megatron", *arguments)
    return tuple(
        ProcessPlan(
            rank=rank,
            argv=argv,
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": ADDRESS,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(threads),
            },
        )
        for rank in range(size)
    )
