"""Back ends that make a new box for every run: a command that isolates, and in it the supervisor of `gppo_box`."""

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

from gppo_verifiers.sandbox.base import End, Facts, IsolationError, Limits, Program
from gppo_verifiers.sandbox.cgroups import Hierarchy
from gppo_verifiers.sandbox.watch import run_watched

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TRIAL = Program(("/bin/true",))
COMPLAINT_BYTES = 1000
END_SECONDS = 10.0


class Launcher(Protocol):
    """How the boxes of one cell are made. uid: whose the programs are. fix: what to do where nothing runs in them."""

    @property
    def uid(self) -> int: ...

    @property
    def fix(self) -> str: ...

    def command(self, limits: Limits) -> Sequence[str]:
        """Makes a box and starts its supervisor. Raises OSError."""
        ...

    def clean_up(self) -> None:
        """A run has failed: remove what its command may have left."""
        ...


class BoxCell:
    """Implements `Cell`. Raises IsolationError where nothing runs in such a box."""

    def __init__(self, hierarchy: Hierarchy, launcher: Launcher, seccomp: bytes) -> None:
        self._hierarchy, self._launcher, self._seccomp = hierarchy, launcher, seccomp
        facts = self.run(TRIAL)
        if facts.exit_code != 0:
            raise IsolationError(f"nothing runs: {facts.fault or facts.stderr.decode()}; {launcher.fix}")

    def run(self, program: Program) -> Facts:
        facts = run_watched(program, self._hierarchy, lambda: self._open(program.limits), self._launcher.uid)
        if facts.end is End.FAULT:
            with suppress(OSError, subprocess.SubprocessError):  # the run has failed, and its fault is told already
                self._launcher.clean_up()
        return facts

    def close(self) -> None:
        """Nothing is kept between runs."""

    def _open(self, limits: Limits) -> "Box":
        return Box(self._launcher.command(limits), self._seccomp)


class Box:
    """Implements `Runner`: the box of one run. Raises OSError where the command cannot be started."""

    def __init__(self, command: Sequence[str], seccomp: bytes) -> None:
        self._seccomp = seccomp
        self._complaints = os.memfd_create("complaints", os.MFD_CLOEXEC)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=self._complaints,
                    stderr=self._complaints,
                    env={"PATH": PATH},
                    cwd="/",
                )
        except BaseException:
            self.channel.close()
            os.close(self._complaints)
            raise

    def encode(self, program: Program) -> bytes:
        """As `gppo_box.request_of` reads it."""
        limits = [text for name, value in asdict(program.limits).items() for text in (name, str(value))]
        arguments, names = program.arguments, list(program.files)
        fields = [self._seccomp.hex(), str(len(arguments)), *arguments, str(len(names)), *names, *limits]
        return os.fsencode("\0".join(fields))

    def receive(self) -> Any:
        try:
            packet = self.channel.recv(1 << 16)
        except ConnectionResetError:
            packet = b""
        return json.loads(packet) if packet else {}

    def complaint(self) -> str:
        return os.pread(self._complaints, COMPLAINT_BYTES, 0).decode("utf-8", "replace").strip()

    def finish(self, failed: bool) -> None:
        """The box is over, or is ended. Returns when its processes are gone."""
        self.channel.close()
        try:
            if failed:
                self._process.kill()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        finally:
            os.close(self._complaints)
