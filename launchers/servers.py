"""Starts a run's rollout servers on this machine, starts those again that die, and leaves none behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import IO

from gppo_megatron.config.model_folder import model_path
from gppo_megatron.config.rollouts import ServerRollout
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.config.started import ADDRESS, Start, StartSglang, StartVllm
from gppo_megatron.errors import ConfigError
from launchers.groups import dying_with, ending, signal_group
from launchers.local import NO_COMPANIONS, Companions
from launchers.plan_servers import ServerPlan, plan_servers

STOP_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""
LAST_LINES, LAST_BYTES = 20, 65_536


def open_servers(config: RunConfig, environment: Mapping[str, str]) -> Companions:
    """The `Companions` of a run: the servers it starts, if it does. environment: this process's.

    Raises ConfigError where they cannot be started here. Nothing is started yet.
    """
    rollout = config.rollout
    if not isinstance(rollout, ServerRollout) or rollout.start is None:
        return NO_COMPANIONS
    check_startable(rollout.start)
    folder, model = Path(config.run), model_path(config)
    plans = plan_servers(rollout, rollout.start, config, model, environment)
    return Servers(
        plans, lambda: folder.is_dir() and model.is_dir(), rollout.start.restarts, rollout.start.restart_seconds
    )


def check_startable(start: Start) -> None:
    """Raises ConfigError for a port in use, or an environment that does not hold the server's package."""
    for port in start.ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ADDRESS, port))
            except OSError as error:
                raise ConfigError(
                    f"rollout.start.port: {ADDRESS}:{port} cannot be served at: {error.strerror}; "
                    "choose another port, or stop what listens there"
                ) from error
    if isinstance(start, StartSglang | StartVllm):
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
        found = subprocess.run([start.python, "-I", "-c", find, start.kind], capture_output=True, check=False)
        if found.returncode:
            raise ConfigError(
                f"rollout.start.python: {start.python} finds no package {start.kind}; install it in that environment, "
                "or name the python of another one"
            )


class Servers:
    """`Companions` of a run. They start once `ready`, and a server that ends starts again.

    restarts: of one server within so many seconds, at most.
    """

    def __init__(self, plans: Sequence[ServerPlan], ready: Callable[[], bool], restarts: int, seconds: float) -> None:
        self._plans = plans
        self._ready = ready
        self._restarts, self._seconds = restarts, seconds
        self._running: list[_Server] = []

    def watch(self) -> str:
        """See `Companions.watch`."""
        if not self._running and self._ready():
            self._plans[0].log.parent.mkdir(exist_ok=True)
            for plan in self._plans:
                self._running.append(_Server(plan))
                self._running[-1].start()
        for server in self._running:
            if fault := self._look_at(server):
                return fault
        return ""

    def close(self) -> None:
        """See `Companions.close`."""
        for server in self._running:
            server.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while any(server.alive for server in self._running) and time.monotonic() < deadline:
            time.sleep(0.05)
        for server in self._running:
            server.close()

    def _look_at(self, server: "_Server") -> str:
        if server.alive:
            return ""
        server.signal(signal.SIGKILL)  # what it had started
        now = time.monotonic()
        while server.ends and server.ends[0] < now - self._seconds:
            server.ends.popleft()
        server.ends.append(now)
        end = f"rollout server {server.plan.url} {server.ending}"
        if len(server.ends) > self._restarts:
            again = f", for the {len(server.ends)}. time in {self._seconds:g} s" if self._restarts else ""
            return f"{end}{again}; its log {server.plan.log} ends:\n{server.last_lines}"
        print(
            f"{end}; started again ({len(server.ends)} of {self._restarts} times in {self._seconds:g} s)",
            file=sys.stderr,
            flush=True,
        )
        server.start()
        return ""


class _Server:
    """One server, its log, and when it ended (`ends`, in seconds of the monotonic clock)."""

    def __init__(self, plan: ServerPlan) -> None:
        self.plan = plan
        self.ends: deque[float] = deque()
        self._log: IO[bytes] = plan.log.open("ab+")
        self._process: Popen[bytes] | None = None

    def start(self) -> None:
        self._process = Popen(
            self.plan.argv,
            env=dict(self.plan.environment),
            stdin=DEVNULL,
            stdout=self._log,
            stderr=STDOUT,
            start_new_session=True,
            preexec_fn=dying_with(os.getpid()),
        )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ending(self) -> str:
        assert self._process is not None
        return ending(self._process.wait())

    @property
    def last_lines(self) -> str:
        """Of the log, which may have been removed with the run's folder."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - LAST_BYTES))
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LAST_LINES:]) or "    (it is empty)"

    def signal(self, number: int) -> None:
        if self._process is not None:
            signal_group(self._process, number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._log.close()
