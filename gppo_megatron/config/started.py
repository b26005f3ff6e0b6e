"""The sections of `rollout.start:`, a kind of server each: servers that `gppo launch` starts on its own machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Started:
    """What all kinds have in common.

    count: servers. port: of the first; the others have the ports after it.
    arguments: added to the command. environment: variables on top of the launcher's own.
    gpus: CUDA_VISIBLE_DEVICES of each server, a text each; null: the launcher's own.
    restarts: of one server that died, within `restart_seconds`, at most; one more ends the run.
    """

    count: int = 1
    port: int = 30_000
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] | None = None
    restarts: int = 3
    restart_seconds: float = 1800.0

    @property
    def ports(self) -> range:
        return range(self.port, self.port + self.count)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://{ADDRESS}:{port}" for port in self.ports)


@dataclass(frozen=True)
class StartEmbedded(Started):
    """`gppo serve-embedded`, of this very installation."""

    kind: Literal["embedded"] = "embedded"


@dataclass(frozen=True, kw_only=True)
class Elsewhere(Started):
    """python: of the environment in which the server is installed."""

    python: str


@dataclass(frozen=True, kw_only=True)
class StartSglang(Elsewhere):
    """SGLang by its launch command."""

    kind: Literal["sglang"] = "sglang"


@dataclass(frozen=True, kw_only=True)
class StartVllm(Elsewhere):
    """vLLM by its launch command."""

    kind: Literal["vllm"] = "vllm"


Start = StartEmbedded | StartSglang | StartVllm
