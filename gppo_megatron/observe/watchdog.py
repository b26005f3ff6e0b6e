"""Signs of life: every process keeps a small file fresh and watches the next process's, so that a hang has a name.

Files, because they need no collective, no server, and no process that must itself be alive. The run folder is on a disk
that all processes share.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from gppo_megatron.errors import Interrupted, StalledError
from gppo_megatron.observe.stop_request import StopRequest

ALARM = "alarm"
LONGEST_PAUSE = 2.0


@dataclass(frozen=True)
class Sign:
    """What a process says of itself. beat: how often it has said so; entered: how many phases it has begun."""

    host: str
    pid: int
    phase: str
    entered: int
    beat: int


@dataclass(frozen=True)
class Deadlines:
    """In seconds. silence: without a sign of life; phase: in one phase; grace: from SIGTERM to the end."""

    silence: float
    phase: float
    grace: float

    @property
    def pause(self) -> float:
        """Between two signs."""
        return min(LONGEST_PAUSE, self.silence / 5, self.phase / 5, self.grace / 5)


class Watchdog:
    """Watches over a run from a thread of its own, on every process.

    Where something is stuck, it says on stderr who and where, leaves word in `folder` for the others, has every process
    that still can dump the stacks of its threads, and ends it: with status 76, or 143 where SIGTERM came and the run
    did not end within its grace. It works inside its `with`.
    folder: of this run alone, made if missing, without files of an earlier start. end: how to end the process.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        deadlines: Deadlines,
        stop: StopRequest,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._folder, self._rank, self._size, self._deadlines = folder, rank, size, deadlines
        self._stop, self._clock, self._end = stop, clock, end
        self._phase = ("start", 0)  # its name and place; written by the main thread, the beats by the watching one
        self._beats = 0
        self._since = self._heard = clock()
        self._told: float | None = None
        self._last_of_next: Sign | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching, and being watched."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(OSError):
            self._file(self._rank).unlink()

    def enter(self, phase: str) -> None:
        """Say what this process does from now on; its clock starts anew."""
        self._since = self._clock()
        self._phase = (phase, self._phase[1] + 1)

    def look(self) -> str | None:
        """Give a sign of life, and look at the others'. What is wrong; None when nothing is."""
        self._beat()
        now = self._clock()
        if self._told is not None and now - self._told > self._deadlines.grace:
            return f"SIGTERM came, and this step did not end within save.grace = {self._deadlines.grace:g} s"
        if now - self._since > self._deadlines.phase:
            return self._slow()
        following = (self._rank + 1) % self._size
        sign = self.read(following)
        if following == self._rank or sign != self._last_of_next:
            self._heard, self._last_of_next = now, sign
        if now - self._heard <= self._deadlines.silence:
            return None
        where = "it never gave one" if sign is None else f"it was last seen in {sign.phase}"
        silent = f"no sign of life for watchdog.silence = {self._deadlines.silence:g} s"
        return (
            f"rank {following}{_place(sign)} has given {silent}; {where}. It is stopped, starved, or its node is gone"
        )

    def read(self, rank: int) -> Sign | None:
        """The latest sign of a process; None where there is none."""
        try:
            return Sign(**json.loads(self._file(rank).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _slow(self) -> str:
        """This process's phase takes too long: the processes that are furthest behind are what it waits for."""
        signs = {rank: sign for rank in range(self._size) if (sign := self.read(rank)) is not None}
        behind = min(sign.entered for sign in signs.values())
        late = [rank for rank, sign in signs.items() if sign.entered == behind]
        limit = f"watchdog.phase = {self._deadlines.phase:g} s"
        if len(late) == len(signs):
            return f"every process has been in {self._phase[0]} for {limit}, rank {self._rank} among them"
        named = ", ".join(f"rank {rank}{_place(signs[rank])} is still in {signs[rank].phase}" for rank in late)
        return f"{named}, while rank {self._rank} has been in {self._phase[0]} for {limit}"

    def _watch(self) -> None:
        while not self._closed.is_set():
            problem = self.look()
            if problem is not None:
                self._raise_alarm(problem)
                return
            if (self._folder / ALARM).exists():
                self._dump(f"rank {self._rank} was in {self._phase[0]}")
                self._end(StalledError.exit_code)
                return
            if self._stop.wait(self._deadlines.pause) and self._told is None:
                self._told = self._clock()

    def _raise_alarm(self, problem: str) -> None:
        print(f"watchdog of rank {self._rank}: {problem}", file=sys.stderr, flush=True)
        late = self._told is not None and self._clock() - self._told > self._deadlines.grace
        with suppress(OSError):
            (self._folder / ALARM).write_text(problem + "\n", encoding="utf-8")
        self._dump(f"rank {self._rank} was in {self._phase[0]}")
        self._closed.wait(2 * self._deadlines.pause)  # the others read the alarm before a launcher ends them
        self._end(Interrupted.exit_code if late else StalledError.exit_code)

    def _dump(self, headline: str) -> None:
        print(f"{headline}; its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr)

    def _beat(self) -> None:
        """A full disk or a folder that is gone silences this process, as it should."""
        self._beats += 1
        sign = Sign(socket.gethostname(), os.getpid(), *self._phase, self._beats)
        new = self._file(self._rank).with_suffix(".new")
        with suppress(OSError):
            new.write_text(json.dumps(asdict(sign)), encoding="utf-8")
            new.replace(self._file(self._rank))

    def _file(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.json"


def _place(sign: Sign | None) -> str:
    return "" if sign is None else f" (pid {sign.pid} on {sign.host})"
