"""Starts the processes of a run on this machine, watches them, and leaves none behind."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import Protocol

from gppo_megatron.errors import GppoError, PeerLostError
from launchers.groups import dying_with, ending, signal_group
from launchers.output import Output
from launchers.plan import ADDRESS, ProcessPlan

POLL_SECONDS = 0.05
CAUSE_SECONDS = 2.0
"""How long to wait, once processes report a lost peer, for the one that was lost."""
STOP_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Exit:
    """An ended process. status: its exit status, or minus the signal that killed it."""

    rank: int
    status: int

    def __str__(self) -> str:
        return f"rank {self.rank} {ending(self.status)}"


class Companions(Protocol):
    """What a run needs beside its processes."""

    def watch(self) -> str:
        """Look after them for a moment; why the run cannot go on, or nothing."""
        ...

    def close(self) -> None:
        """End them all."""
        ...


class NoCompanions:
    """The `Companions` of a run that needs none."""

    def watch(self) -> str:
        return ""

    def close(self) -> None:
        """There are none."""


NO_COMPANIONS = NoCompanions()


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def run_processes(
    plans: Sequence[ProcessPlan], grace_seconds: float = STOP_SECONDS, companions: Companions = NO_COMPANIONS
) -> int:
    """Run all processes to their end; returns the exit status of the whole. The companions end after them.

    0 when all succeed. As soon as one fails all others are stopped and one line on stderr says why; the status is
    the failed one's, or 128 + its signal. SIGINT, SIGTERM and SIGHUP stop all: 128 + that signal. They get
    grace_seconds to save their state; a second signal ends them at once.
    Rank 0 writes to this process's stdout and stderr; whatever other ranks write goes to stderr as `rank k: ...`.
    Must be called from the main thread, in a process without other threads.
    """
    with _signals_noted() as received:
        crew = _Crew()
        try:
            crew.start(plans)
            return _supervise(crew, received, grace_seconds, companions)
        finally:
            crew.close()
            companions.close()


def _supervise(crew: "_Crew", received: Sequence[int], grace_seconds: float, companions: Companions) -> int:
    while crew.live:
        crew.watch()
        if received:
            count = crew.stop(grace_seconds, until=lambda: len(received) > 1)
            print(f"interrupted; stopped {_count(count)}", file=sys.stderr)
            return 128 + received[0]
        if crew.failures:
            cause = _find_cause(crew, received)
            count = crew.stop()
            ending = f"; stopped the other {_count(count)}" if count else ""
            print(f"{cause}{ending}", file=sys.stderr)
            return cause.status if cause.status > 0 else 128 - cause.status
        if crew.live and (fault := companions.watch()):
            print(f"stopped {_count(crew.stop())}: {fault}", file=sys.stderr)
            return GppoError.exit_code
    return 0


def _find_cause(crew: "_Crew", received: Sequence[int]) -> Exit:
    """The first failure that is not merely the loss of another process, if one shows up in time."""
    deadline = time.monotonic() + CAUSE_SECONDS
    while True:
        causes = [failure for failure in crew.failures if failure.status != PeerLostError.exit_code]
        if causes or not crew.live or received or time.monotonic() > deadline:
            return (causes or crew.failures)[0]
        crew.watch()


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


class _Crew:
    """The started processes. Each leads a session, and so a group, of its own: a terminal's Ctrl-C does not reach it,
    and what it starts (verifier workers) can be stopped with it.
    """

    def __init__(self) -> None:
        self.live: dict[int, Popen[bytes]] = {}
        self.failures: list[Exit] = []
        self._output = Output()

    def start(self, plans: Sequence[ProcessPlan]) -> None:
        for plan in plans:
            process = Popen(
                plan.argv,
                env={**os.environ, **plan.environment},
                stdin=DEVNULL,
                stdout=None if plan.rank == 0 else PIPE,
                stderr=None if plan.rank == 0 else STDOUT,
                start_new_session=True,
                preexec_fn=dying_with(os.getpid()),
            )
            self.live[plan.rank] = process
            if process.stdout is not None:
                self._output.add(process.stdout, f"rank {plan.rank}: ")

    def watch(self) -> None:
        """Copy output for a moment, then take note of the processes that ended."""
        self._output.forward(POLL_SECONDS)
        ended = [Exit(rank, status) for rank, process in self.live.items() if (status := process.poll()) is not None]
        for end in ended:
            signal_group(self.live.pop(end.rank), signal.SIGKILL)
        # Ended within one poll: a killed process is the cause, and an error elsewhere its consequence.
        self.failures += sorted((end for end in ended if end.status != 0), key=lambda end: end.status >= 0)

    def stop(self, seconds: float = STOP_SECONDS, until: Callable[[], bool] = lambda: False) -> int:
        """End all live processes, politely for so long, or `until` that is over; returns how many there were."""
        count = len(self.live)
        for process in self.live.values():
            signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while self.live and time.monotonic() < deadline and not until():
            self.watch()
        self._kill()
        self._output.drain()  # so that the last word is the launcher's
        return count

    def close(self) -> None:
        self._kill()
        self._output.close()

    def _kill(self) -> None:
        for process in self.live.values():
            signal_group(process, signal.SIGKILL)
        for process in self.live.values():
            process.wait()
        self.live.clear()


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Inside, a signal to stop is added to the list, and does nothing else."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        numbers.append(signal.SIGHUP)
    previous = {
        number: signal.signal(number, lambda received_now, _: received.append(received_now)) for number in numbers
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
