"""The section `judge:`: who decides whether an answer is right."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LocalCode:
    """Programs run on this machine, in a sandbox that needs root; opened where the answers are programs.

    workers: programs at once, for each process of the run.
    cpu_seconds, memory_mib: what a test may use where its task sets no limits of its own.
    """

    kind: Literal["local"] = "local"
    sandbox: Literal["zygote", "bwrap", "crun", "runc", "docker"] = "zygote"
    workers: int = 1
    cpu_seconds: float = 4.0
    memory_mib: int = 512


@dataclass(frozen=True)
class ServiceCode:
    """Programs run on other nodes, each with `gppo serve-verifiers`.

    urls: of the services. token_env: name of the environment variable that holds their token.
    request_seconds: how long a service may take to reply. recovery_seconds: how long answers wait for a service while
    none judges them; then they have no score. attempts: how often an answer is judged whose judge fails.
    """

    urls: tuple[str, ...]
    kind: Literal["service"] = "service"
    token_env: str | None = None
    request_seconds: float = 30.0
    recovery_seconds: float = 600.0
    attempts: int = 3


@dataclass(frozen=True)
class Judge:
    """Verifiers run in worker processes; timeout is the seconds one answer may take. code: the judge of programs."""

    timeout: float = 10.0
    workers: int = 1
    code: LocalCode | ServiceCode = field(default_factory=LocalCode)
