"""What `gppo serve-verifiers` runs."""

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import closing
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from gppo_verifiers.code.jobs import wall_seconds
from gppo_verifiers.code.judge import CodeJudge
from gppo_verifiers.code.selftest import SANDBOXES, table, trials
from gppo_verifiers.errors import ServiceError
from gppo_verifiers.sandbox.base import Limits
from gppo_verifiers.service.app import service
from gppo_verifiers.service.arguments import Options
from gppo_verifiers.service.desk import Desk

KEPT_JOBS = 65_536
CLOSING_SECONDS = 10


def selftest(sandbox_name: str, languages: Sequence[str]) -> int:
    """Print what the sandbox holds and what not; 1 where a row failed. Raises IsolationError."""
    with closing(SANDBOXES[sandbox_name]()) as sandbox:
        rows = trials(sandbox, languages)
    print(table(rows))
    return 0 if all(row.passed for row in rows) else 1


def serve(options: Options) -> None:
    """Serve until SIGTERM or SIGINT, then finish the jobs at hand; a second signal ends at once.

    Raises ServiceError for an address that cannot be served at, and IsolationError for a machine that cannot isolate.
    """
    if options.token is None and not is_loopback(options.host):
        raise ServiceError(f"{options.host} can be reached from other machines, so a token is needed; set one")
    try:
        listening = socket.create_server((options.host, options.port), family=_family(options.host))
    except OSError as error:
        raise ServiceError(f"cannot listen at {options.host}:{options.port}: {error.strerror}") from error
    limits = Limits(
        cpu_seconds=options.cpu_seconds,
        wall_seconds=wall_seconds(options.cpu_seconds),
        memory_bytes=options.memory_mib << 20,
    )
    sandbox = SANDBOXES[options.sandbox]()
    with listening, closing(CodeJudge(sandbox, options.workers, limits, options.languages)) as judge:
        desk = Desk(judge, options.workers, options.queue, KEPT_JOBS)
        app = service(desk, judge, frozenset({"code"}), options.canary_seconds, options.token)
        print(f"judging programs at http://{options.host}:{listening.getsockname()[1]}", flush=True)
        DrainingServer(app, desk, options.drain_seconds).run(sockets=[listening])


class DrainingServer(uvicorn.Server):
    """At the first signal the desk takes no more jobs, and finishes those it has; then the server ends."""

    def __init__(self, app: Starlette, desk: Desk, drain_seconds: float) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=CLOSING_SECONDS))
        self._desk = desk
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is not None or not self.started:
            super().handle_exit(sig, frame)
        else:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._desk.drain(self._drain_seconds)
        self.should_exit = True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
