"""RunConfig -> the rollout servers to start. Pure: starts nothing, reads nothing from the machine."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gppo_megatron.config.rollouts import ServerRollout
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.config.started import ADDRESS, Start, StartEmbedded, StartSglang, StartVllm

FOLDER = "servers"
"""Of the run's folder, where the servers' logs are."""

OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@dataclass(frozen=True)
class ServerPlan:
    """One server. environment: all of it. log: what its output is added to."""

    url: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


def plan_servers(
    rollout: ServerRollout, start: Start, config: RunConfig, model: Path, environment: Mapping[str, str]
) -> tuple[ServerPlan, ...]:
    """The servers that `start` asks for. model: its folder. environment: the launcher's."""
    folder = Path(config.run) / FOLDER
    plans = []
    for number, (port, url) in enumerate(zip(start.ports, start.urls, strict=True)):
        command = (*_command(start, config, model, rollout.context), "--host", ADDRESS, "--port", str(port))
        gpus = {} if start.gpus is None else {"CUDA_VISIBLE_DEVICES": start.gpus[number]}
        given = _environment(start, environment) | {"OMP_NUM_THREADS": str(config.threads)} | gpus
        plans.append(
            ServerPlan(
                url,
                (*command, "--dtype", config.precision.dtype, *start.arguments),
                given | dict(start.environment),
                folder / f"{port}.log",
            )
        )
    return tuple(plans)


def _command(start: Start, config: RunConfig, model: Path, context: int) -> tuple[str, ...]:
    match start:
        case StartEmbedded():
            return (sys.executable, "-m", "gppo_megatron", "serve-embedded", str(model), "--context", str(context))
        case StartSglang(python=python):
            command = (python, "-m", "sglang.launch_server", "--model-path", str(model))
            experts = ("--enable-return-routed-experts",) if config.objective.routing == "replayed" else ()
            return (*command, "--context-length", str(context), *experts)
        case StartVllm(python=python):
            needed = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")
            command = (python, "-m", "vllm.entrypoints.cli.main", "serve", str(model))
            return (*command, "--max-model-len", str(context), *needed)


def _environment(start: Start, inherited: Mapping[str, str]) -> dict[str, str]:
    """Another environment's python must not find this one's packages."""
    match start:
        case StartSglang(python=python) | StartVllm(python=python):
            kept = {name: value for name, value in inherited.items() if name not in OF_THIS_PYTHON}
            path = f"{Path(python).parent}:{inherited.get('PATH', '')}".rstrip(":")
            mode = {"VLLM_SERVER_DEV_MODE": "1"} if isinstance(start, StartVllm) else {}
            return kept | {"PATH": path} | mode
        case _:
            return dict(inherited)
