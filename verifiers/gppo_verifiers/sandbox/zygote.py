"""The fork server back end: a run starts as a fork of a Python that is already there, inside the jail.

Needs root and Linux's control groups. See `zygote_server` for the other side.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gppo_verifiers.sandbox.base import ENVIRONMENT, PYTHON, Cell, Facts, IsolationError, Program
from gppo_verifiers.sandbox.cgroups import Hierarchy, open_hierarchy
from gppo_verifiers.sandbox.seccomp import filter_program
from gppo_verifiers.sandbox.watch import run_watched

SERVER = Path(__file__).with_name("zygote_server.py")
PRELOAD = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json"),
    *("math", "operator", "queue", "random", "re", "statistics", "string", "typing"),
)
"""What programs import most; already there, an import is a look in a table."""
FIRST_UID, UIDS = 62_000, 1000
START_SECONDS = 60.0


class ZygoteSandbox:
    """Implements `Sandbox`."""

    name = "zygote"

    def __init__(self) -> None:
        if sys.platform != "linux" or os.geteuid() != 0:
            raise IsolationError("the zygote sandbox needs Linux and root, to make namespaces and control groups")
        if not os.access(PYTHON, os.X_OK):
            raise IsolationError(f"there is no {PYTHON}; install the system's Python (Debian: apt install python3)")
        self._filter = filter_program()
        self._hierarchy = open_hierarchy()
        self._numbers = count()

    def open_cell(self) -> Cell:
        uid = FIRST_UID + next(self._numbers) % UIDS
        return ZygoteCell(self._hierarchy, self._filter, uid, server_process)

    def close(self) -> None:
        self._hierarchy.close()


class ZygoteCell:
    """Implements `Cell`. A fork server that failed is replaced at the next run. start: starts its process."""

    def __init__(self, hierarchy: Hierarchy, seccomp: bytes, uid: int, start: Callable[[], "Started"]) -> None:
        self._hierarchy, self._uid, self._start = hierarchy, uid, start
        self._greeting = json.dumps({"uid": uid, "filter": seccomp.hex(), "preload": PRELOAD}).encode()
        self._server: ForkServer | None = ForkServer(start, self._greeting)

    def run(self, program: Program) -> Facts:
        return run_watched(program, self._hierarchy, self._open, self._uid)

    def close(self) -> None:
        if self._server is not None:
            self._server.finish(failed=True)
            self._server = None

    def _open(self) -> "ForkServer":
        if self._server is None or self._server.closed:
            self._server = ForkServer(self._start, self._greeting)
        return self._server


@dataclass(frozen=True)
class Started:
    """A fork server's process: our end of its socket, and what ends it."""

    channel: socket.socket
    stop: Callable[[], None]


def server_process() -> Started:
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [PYTHON, "-s", str(SERVER), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=dict(ENVIRONMENT),
            cwd="/",
            start_new_session=True,
        )

    def stop() -> None:
        process.kill()
        process.wait()

    return Started(channel, stop)


class ForkServer:
    """Implements `Runner`. Raises IsolationError where the server does not start."""

    def __init__(self, start: Callable[[], Started], greeting: bytes) -> None:
        self.closed = False
        started = start()
        self.channel, self._stop = started.channel, started.stop
        try:
            self.channel.settimeout(START_SECONDS)
            self.channel.send(greeting)
            answer = self.receive()
        except OSError as error:
            answer = {"fault": str(error)}
        self.channel.settimeout(None)
        if answer != {"ready": True}:
            self.finish(failed=True)
            raise IsolationError(f"the fork server does not start: {answer.get('fault', 'it ended without a word')}")

    def encode(self, program: Program) -> bytes:
        limits = asdict(program.limits)
        request = {"arguments": program.arguments, "names": list(program.files), "limits": limits}
        return json.dumps(request).encode()

    def receive(self) -> Any:
        packet = self.channel.recv(1 << 16)
        return json.loads(packet) if packet else {}

    def complaint(self) -> str:
        return ""

    def finish(self, failed: bool) -> None:
        if failed:
            # A run's supervisor sees that the channel is closed, and ends the run.
            self.closed = True
            self.channel.close()
            self._stop()
