"""One run as the judge sees it: hands it over, takes its output, ends it at a limit, and gathers the facts."""

import array
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol

from gppo_verifiers.sandbox.base import End, Facts, IsolationError, Program
from gppo_verifiers.sandbox.cgroups import Group, Hierarchy
from gppo_verifiers.sandbox.sealed import sealed_file

POLL_SECONDS = 0.02
START_SECONDS = 120.0
"""How long a program may take to be there; that is the sandbox's time, and not its own."""
KILL_SECONDS = 10.0
"""How long a killed run may take to be over."""
LOST = "what starts programs was lost during the run"


class Runner(Protocol):
    """What starts programs, on the other side of a channel: `gppo_inside` says what comes from it."""

    channel: socket.socket

    def encode(self, program: Program) -> bytes:
        """The request, to go with the run's descriptors."""
        ...

    def receive(self) -> Any:
        """The next message; empty where the other side is gone. Raises OSError."""
        ...

    def complaint(self) -> str:
        """What it had to say beside; empty if nothing."""
        ...

    def finish(self, failed: bool) -> None:
        """The run is over; failed: nothing is to be trusted or left."""
        ...


def run_watched(program: Program, hierarchy: Hierarchy, open_runner: Callable[[], Runner], uid: int) -> Facts:
    """A whole run, as `Cell.run` has it. uid: whom the program's output pipes belong to, so that it can open them."""
    runner: Runner | None = None
    try:
        runner = open_runner()
        group = hierarchy.create(program.limits)
    except Exception as error:  # noqa: BLE001 - whatever it is, it says nothing about the program
        for descriptor in (program.stdin, program.stdout):
            if isinstance(descriptor, int):
                os.close(descriptor)
        if runner is not None:
            runner.finish(failed=True)
        return _fault(f"no run can be started: {_told(error)}")
    facts = _fault("the run was not begun")
    try:
        facts = Watch(program, group, runner, uid).run()
    except Exception as error:  # noqa: BLE001 - the same
        facts = _fault(f"the run cannot be watched: {_told(error)}")
    finally:
        if facts.end is End.FAULT and (complaint := runner.complaint()):
            facts = _fault(f"{facts.fault} ({complaint})")
        try:
            group.remove()
        except Exception as error:  # noqa: BLE001 - the same
            facts = _fault(f"what ran cannot be removed: {_told(error)}")
        runner.finish(facts.end is End.FAULT)
    return facts


class Watch:
    """One run, from the request to the facts."""

    def __init__(self, program: Program, group: Group, runner: Runner, uid: int) -> None:
        self._program, self._group, self._runner, self._uid = program, group, runner, uid
        self._limits = program.limits
        self._end: End | None = None
        self._fault = ""
        self._started: float | None = None
        self._killed: float | None = None
        self._status: int | None = None
        self._streams: dict[int, bytearray] = {}
        """What came out so far, by our end of the pipe."""

    def run(self) -> Facts:
        with ExitStack() as resources:
            outputs = self._send(resources)
            self._follow(time.monotonic())
            over = time.monotonic()
            for descriptor in self._streams:
                self._drain(descriptor)
            streams = [self._kept(out) for out in outputs]
        if self._status is None or self._started is None:
            return _fault(self._fault or LOST)
        code = os.waitstatus_to_exitcode(self._status)
        return Facts(
            end=self._end or End.FINISHED,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=streams[0],
            stderr=streams[1],
            cpu_seconds=self._group.cpu_seconds(),
            wall_seconds=over - self._started,
            waited_seconds=self._group.waited_seconds(),
            memory_peak_bytes=self._group.memory_peak_bytes(),
            out_of_memory=self._group.out_of_memory(),
            processes_refused=self._group.processes_refused(),
        )

    def _send(self, resources: ExitStack) -> Sequence[int | None]:
        """Hand the run over. Returns our ends of its standard output and error; None where the caller reads it."""
        program = self._program

        def owned(descriptor: int) -> int:
            resources.callback(os.close, descriptor)
            return descriptor

        with ExitStack() as passed:

            def lent(descriptor: int) -> int:
                passed.callback(os.close, descriptor)
                return descriptor

            stdin = lent(program.stdin if isinstance(program.stdin, int) else sealed_file(program.stdin))
            ours: list[int | None] = []
            theirs: list[int] = []
            for given in (program.stdout, None):
                if given is not None:
                    ours.append(None)
                    theirs.append(lent(given))
                    os.fchown(given, self._uid, self._uid)
                    continue
                reader, writer = os.pipe()
                theirs.append(lent(writer))
                os.fchown(writer, self._uid, self._uid)
                ours.append(owned(reader))
                os.set_blocking(reader, False)
                self._streams[reader] = bytearray()
            files = [lent(sealed_file(content, "file")) for content in program.files.values()]
            descriptors = array.array("i", [stdin, *theirs, *files, *self._group.procs])
            self._runner.channel.sendmsg(
                [self._runner.encode(program)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
            )
        return ours

    def _follow(self, asked: float) -> None:
        """Until the run is over: take its output, kill it at a limit."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._runner.channel, selectors.EVENT_READ)
            for reader in self._streams:
                selector.register(reader, selectors.EVENT_READ)
            next_look = asked + POLL_SECONDS
            while self._status is None and not self._fault:
                for key, _ in selector.select(POLL_SECONDS):
                    if key.fd == self._runner.channel.fileno():
                        self._take(self._runner.receive())
                    elif not self._read(key.fd):
                        selector.unregister(key.fd)
                now = time.monotonic()
                if self._started is None:
                    if now - asked > START_SECONDS:
                        self._fault = f"the program had not started after {START_SECONDS:g} s"
                elif self._end is None and now > next_look:
                    self._end = self._over_limit(now - self._started)
                    next_look = now + POLL_SECONDS
                if self._end is not None:
                    self._kill(now)

    def _kill(self, now: float) -> None:
        """Again and again, as a run may still be on its way into the group."""
        self._group.kill()
        self._killed = self._killed or now
        if now - self._killed > KILL_SECONDS:
            self._fault = f"the run was not over {KILL_SECONDS:g} s after it was killed"

    def _over_limit(self, wall_seconds: float) -> End | None:
        if self._group.cpu_seconds() > self._limits.cpu_seconds:
            return End.CPU_LIMIT
        if wall_seconds > self._limits.wall_seconds:
            return End.WALL_LIMIT
        return None

    def _take(self, message: Any) -> None:
        """Act on a message of the server; any but those it has to send is a fault."""
        match message:
            case {"started": True}:
                self._started = time.monotonic()
            case {"status": int(status)}:
                self._status = status
            case {"fault": str(fault)}:
                self._fault = fault
            case _:
                self._fault = LOST

    def _kept(self, reader: int | None) -> bytes:
        return b"" if reader is None else bytes(self._streams[reader])

    def _read(self, reader: int) -> bool:
        """Take one piece of output; False at its end."""
        try:
            data = os.read(reader, 1 << 16)
        except BlockingIOError:
            return True
        self._keep(reader, data)
        return bool(data)

    def _drain(self, reader: int) -> None:
        """What is still in the pipe. Nobody writes to it any more, as the run is over."""
        with suppress(BlockingIOError):
            while data := os.read(reader, 1 << 16):
                self._keep(reader, data)

    def _keep(self, reader: int, data: bytes) -> None:
        kept = self._streams[reader]
        kept += data[: self._limits.output_bytes - len(kept) + 1]
        if len(kept) > self._limits.output_bytes:
            del kept[self._limits.output_bytes :]
            self._end = self._end or End.OUTPUT_LIMIT


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | IsolationError) else f"{type(error).__name__}: {error}"


def _fault(reason: str) -> Facts:
    return Facts(End.FAULT, fault=reason)
