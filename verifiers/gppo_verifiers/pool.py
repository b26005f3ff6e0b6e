"""A judge whose verifiers run in worker processes, where they can neither crash nor hang the trainer.

One thread: `judge` moves bytes to and from every worker, and kills the one whose answer is past its deadline.
"""

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from gppo_verifiers.errors import WorkerStartError
from gppo_verifiers.frames import FrameReader, encode
from gppo_verifiers.types import Answer, Status, Verdict

START_SECONDS = 120.0
START_ATTEMPTS = 3
WINDOW = 16
"""Answers a worker holds at most: enough that it never waits for the next, few enough to spread the work."""


class WorkerProcess:
    """One worker and the answers it holds: the first is being judged, the others wait in its socket."""

    def __init__(self, table: str, memory_bytes: int, cpu_seconds: int) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.setblocking(False)
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(memory_bytes), str(cpu_seconds), table]
            self.process = subprocess.Popen(
                # -P: a file in the working directory must not stand in for a module of the worker.
                [sys.executable, "-P", "-m", "gppo_verifiers.worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # A thread pool a core would reserve more address space than the memory limit allows.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        self.ready = False
        self.ended = False
        self.held: deque[int] = deque()
        self.since = time.monotonic()
        """When the current answer, or the start of the process, began."""
        self._reader = FrameReader()
        self._outbox = bytearray()

    @property
    def sending(self) -> bool:
        return bool(self._outbox)

    def give(self, place: int, frame: bytes) -> None:
        """Queue an answer; its clock starts now if the worker has no other."""
        if not self.held:
            self.since = time.monotonic()
        self.held.append(place)
        self._outbox += frame

    def exchange(self) -> list[Any]:
        """Send and receive what can be without waiting; sets `ended` at the end of the stream."""
        # A worker that is gone shows in what is read, after its last replies.
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._outbox:
                del self._outbox[: self.channel.send(self._outbox)]
        messages: list[Any] = []
        while not self.ended:
            try:
                data = self.channel.recv(1 << 16)
                for message in self._reader.feed(data):
                    messages.append(message)  # one by one: replies before a broken one count
            except BlockingIOError:
                break
            except (ConnectionResetError, ValueError):
                data = b""
            self.ended = not data
        return messages

    def kill(self) -> int:
        """End the worker and all it started; returns its exit code, negative for a signal. May be called twice."""
        if self.process.returncode is None:
            # Its process group surely exists: only this method waits for it. If it is exiting, its own code stays.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        return self.process.wait()


class WorkerPool:
    """Implements `Judge`. An answer may run for timeout_seconds from when a worker begins it; waiting does not count.

    table: where the verifiers are, as `module:name` (see `kinds`).
    memory_bytes: address space of a worker; beyond it a verifier meets MemoryError.
    The kernel ends a worker whose answer used more CPU time than the timeout, even where this process is held up.
    Raises WorkerStartError where a worker cannot start. Create it, and use it, in the process's main thread: Linux
    ends workers with the thread that started them.
    """

    def __init__(
        self,
        workers: int,
        timeout_seconds: float,
        table: str = "gppo_verifiers.kinds:VERIFIERS",
        memory_bytes: int = 4 << 30,
    ) -> None:
        if workers < 1 or timeout_seconds <= 0:
            raise ValueError(f"needs a worker and a timeout > 0, got {workers} workers and {timeout_seconds} s")
        self._timeout_seconds = timeout_seconds
        self._table = table
        self._memory_bytes = memory_bytes
        self._failed_starts = 0
        self._closed = False
        self._waiting: deque[int] = deque()
        self._verdicts: dict[int, Verdict] = {}
        self._workers: list[WorkerProcess] = []
        try:
            self._workers += [self._new_worker() for _ in range(workers)]
            while not all(worker.ready for worker in self._workers):
                self._advance()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker; may be called twice."""
        self._closed = True
        while self._workers:
            self._workers.pop().kill()

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        """One verdict an answer, in order. Raises WorkerStartError where no new worker starts; that closes the pool."""
        if self._closed:
            raise ValueError("the pool is closed")
        self._waiting = deque(range(len(answers)))
        self._verdicts = {}
        try:
            # A worker lost since the last call must not be given an answer to blame for it.
            self._collect()
            while len(self._verdicts) < len(answers):
                self._hand_out(answers)
                self._advance()
        except BaseException:
            self.close()
            raise
        return [self._verdicts[place] for place in range(len(answers))]

    def _new_worker(self) -> WorkerProcess:
        return WorkerProcess(self._table, self._memory_bytes, math.ceil(self._timeout_seconds))

    def _hand_out(self, answers: Sequence[Answer]) -> None:
        for worker in self._workers:
            if not worker.ready or len(worker.held) > WINDOW // 2:
                continue
            while self._waiting and len(worker.held) < WINDOW:
                place = self._waiting.popleft()
                task, text = answers[place].task, answers[place].text
                message = {"id": place, "kind": task.kind, "payload": dict(task.payload), "text": text}
                worker.give(place, encode(message))

    def _advance(self) -> None:
        """Wait for news of any worker or the next deadline, and act on it."""
        now = time.monotonic()
        deadlines = filter(None, map(self._deadline, self._workers))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.sending else 0)
                selector.register(worker.channel, events)
            selector.select(max(0.0, min(deadlines) - now))
        self._collect()

    def _deadline(self, worker: WorkerProcess) -> float | None:
        if not worker.ready:
            return worker.since + START_SECONDS
        return worker.since + self._timeout_seconds if worker.held else None

    def _collect(self) -> None:
        """Take in all replies; replace workers that died or are past their deadline."""
        for place, worker in enumerate(self._workers):
            # Replies first: a trainer that was itself held up must not blame the verifier.
            if not all(self._take(worker, message) for message in worker.exchange()):
                worker.ended = True
            deadline = self._deadline(worker)
            late = deadline is not None and time.monotonic() >= deadline
            if worker.ended or late:
                self._workers[place] = self._replace(worker)

    def _take(self, worker: WorkerProcess, message: Any) -> bool:
        """Act on one message of a worker; False for anything but what it had to send."""
        match message:
            case {"failed": reason} if not worker.ready:
                raise WorkerStartError(f"the verifier worker cannot start: {reason}")
            case {"ready": True} if not worker.ready:
                worker.ready = True
                self._failed_starts = 0
            case {"id": place, "score": score, "status": status, "detail": detail} if [place] == list(worker.held)[:1]:
                self._verdicts[worker.held.popleft()] = _verdict_of(score, status, detail)
                worker.since = time.monotonic()
            case _:
                return False
        return True

    def _replace(self, worker: WorkerProcess) -> WorkerProcess:
        """Kill `worker`, give its current answer a verdict without a score, and put the others back."""
        late = not worker.ended
        code = worker.kill()
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if not worker.ready:
            self._failed_starts += 1
            if late or self._failed_starts >= START_ATTEMPTS:
                reason = f"was not ready after {START_SECONDS:g} s" if late else reason
                raise WorkerStartError(f"the verifier worker cannot start: it {reason}")
        elif worker.held:
            self._verdicts[worker.held.popleft()] = (
                Verdict(None, Status.TIMEOUT, f"still running after {self._timeout_seconds:g} s")
                if late or code == -signal.SIGXCPU
                else Verdict(None, Status.CRASH, f"the verifier's process {reason}")
            )
            self._waiting.extendleft(reversed(worker.held))
        return self._new_worker()


def _verdict_of(score: Any, status: Any, detail: Any) -> Verdict:
    """A worker's reply as a verdict; one that makes no sense is a crash."""
    try:
        return Verdict(score, Status(status), str(detail))
    except (TypeError, ValueError) as error:
        return Verdict(None, Status.CRASH, f"the worker sent no verdict: {error}")
