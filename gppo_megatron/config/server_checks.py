"""Checks of where a run's rollout servers are, and of those that it starts itself. No torch."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gppo_megatron.config.rollouts import ServerRollout
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.config.started import Start, StartSglang, StartVllm
from gppo_megatron.errors import ConfigError

LAUNCHED = "GPPO_LAUNCHED"
"""Environment variable of a process that `gppo launch` started, and whose servers it looks after."""

OWN = ("--model-path", "--model", "--host", "--port", "--dtype", "--context", "--context-length", "--max-model-len")
"""Arguments that follow from the run."""


def server_problems(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if not isinstance(rollout, ServerRollout):
        return
    places = {"urls": rollout.urls, "router": rollout.router, "start": rollout.start}
    given = [name for name, value in places.items() if value is not None]
    if len(given) != 1:
        yield f"rollout: one of urls, router and start says where the servers are (got {' and '.join(given) or 'none'})"
    if rollout.start is not None:
        yield from _start_problems(rollout.start)


def _start_problems(start: Start) -> Iterator[str]:
    if start.ports[-1] > 65_535:
        yield f"rollout.start.port: {start.count} servers need ports up to {start.ports[-1]}, more than 65535"
    if start.gpus is not None and len(start.gpus) != start.count:
        yield f"rollout.start.gpus: must name those of each of the {start.count} servers (got {len(start.gpus)} texts)"
    for argument in start.arguments:
        if argument.partition("=")[0] in OWN:
            yield f"rollout.start.arguments: {argument} follows from the run itself; remove it"
    if isinstance(start, StartSglang | StartVllm) and not _is_program(start.python):
        yield (
            f"rollout.start.python: must be the python of the environment that holds {start.kind}, such as "
            f"/opt/{start.kind}/bin/python (got {start.python!r}, which is no program)"
        )


def _is_program(path: str) -> bool:
    return Path(path).is_file() and os.access(path, os.X_OK)


def check_started(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Raises ConfigError in a process whose servers nobody starts."""
    if isinstance(config.rollout, ServerRollout) and config.rollout.start is not None and LAUNCHED not in environment:
        raise ConfigError(
            "rollout.start: `gppo launch` alone starts servers, and this process was started without it; "
            "use it, or start the servers yourself and list them in rollout.urls"
        )
