"""The jobs of a node: a bounded queue, the workers that empty it, and the verdicts until they are fetched."""

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gppo_verifiers.types import Answer, Judge, Status, Verdict
from gppo_verifiers.wire import Job, job_to_json, to_bytes

LONGEST_RETRY_SECONDS = 30
LINGER_SECONDS = 10.0


class RefusedError(Exception):
    """Jobs that are not taken now; they may be elsewhere, or here after `retry_seconds`."""

    def __init__(self, reason: str, retry_seconds: int) -> None:
        super().__init__(reason)
        self.retry_seconds = retry_seconds


class FullError(RefusedError):
    """The queue has no room for them."""


@dataclass
class Entry:
    """One job. answer: None once it is judged. content: a digest of the job. fetched: whether its verdict was."""

    key: str
    answer: Answer | None
    content: bytes
    verdict: asyncio.Future[Verdict]
    fetched: bool = False


@dataclass(frozen=True)
class Results:
    """What there is to say of some keys."""

    verdicts: dict[str, Verdict]
    pending: list[str]
    unknown: list[str]


class Desk:
    """Takes jobs and has them judged, `workers` at a time. All methods belong to one event loop.

    capacity: jobs that may wait. kept: finished jobs that are remembered; the oldest are forgotten first.
    `judge.judge` must be safe to call from several threads.
    """

    def __init__(self, judge: Judge, workers: int, capacity: int, kept: int) -> None:
        self._judge = judge
        self._workers = workers
        self._capacity, self._kept = capacity, kept
        self._entries: dict[str, Entry] = {}
        self._waiting: asyncio.Queue[Entry] = asyncio.Queue()
        self._running: set[str] = set()
        self._finished: dict[str, None] = {}
        self._unproven: set[str] = set()
        self._fault = ""
        self._draining = False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="desk")
        self.counts: Counter[str] = Counter()
        self.judged_seconds = 0.0

    @property
    def waiting(self) -> int:
        return self._waiting.qsize()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def refusal(self) -> str:
        """Why no jobs are taken; empty while they are."""
        return "it is shutting down" if self._draining else self._fault

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Take as many of these jobs as there is room for, and return their keys, those known before among them.

        Raises RefusedError where none is taken, and ValueError, taking none, for a key that had another content.
        """
        if self.refusal:
            self.counts["refused"] += len(jobs)
            raise RefusedError(self.refusal, LONGEST_RETRY_SECONDS)
        new: dict[str, Entry] = {}
        for job in jobs:
            content = hashlib.sha256(to_bytes(job_to_json(job))).digest()
            known = self._entries.get(job.key) or new.get(job.key)
            if known is not None and known.content != content:
                raise ValueError(f"the key {job.key[:80]!r} was that of another job")
            if known is None or _is_infra(known):
                new[job.key] = Entry(job.key, job.answer, content, asyncio.get_running_loop().create_future())
        room = self._capacity - self.waiting
        refused = set(list(new)[room:])
        self.counts["refused"] += len(refused)
        taken = [job.key for job in jobs if job.key not in refused]
        if not taken:
            raise FullError(f"{self.waiting} jobs wait, and {self._capacity} may", self._retry_seconds())
        for entry in list(new.values())[:room]:
            self._finished.pop(entry.key, None)
            self._unproven.discard(entry.key)
            self._entries[entry.key] = entry
            self._waiting.put_nowait(entry)
        return taken

    async def results(self, keys: Iterable[str], wait_seconds: float) -> Results:
        """The verdicts on these keys, once all are there or the time has passed."""
        known = {key: self._entries[key] for key in keys if key in self._entries}
        if unfinished := [entry.verdict for entry in known.values() if not entry.verdict.done()]:
            await asyncio.wait(unfinished, timeout=wait_seconds)
        finished = {key: entry for key, entry in known.items() if entry.verdict.done()}
        for entry in finished.values():
            entry.fetched = True
        return Results(
            verdicts={key: entry.verdict.result() for key, entry in finished.items()},
            pending=[key for key in known if key not in finished],
            unknown=[key for key in keys if key not in known],
        )

    async def run(self) -> None:
        """Judge until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._workers):
                    tasks.create_task(self._work())
        finally:
            self._threads.shutdown()

    def take_out(self, fault: str) -> None:
        """The node cannot be trusted: take no jobs, and give those that wait, and every verdict since `put_back` was
        last called, no score."""
        self._fault = fault
        self.counts["taken_out"] += 1
        while not self._waiting.empty():
            self._finish(self._waiting.get_nowait(), Verdict(None, Status.INFRA, fault))
        for key in self._unproven:
            entry = self._entries[key]
            entry.verdict = asyncio.get_running_loop().create_future()
            entry.verdict.set_result(Verdict(None, Status.INFRA, fault))
        self._unproven.clear()

    def put_back(self) -> None:
        """The node has shown that its verdicts until now are right."""
        self._fault = ""
        self._unproven.clear()

    async def drain(self, seconds: float) -> None:
        """Take no more jobs; return once all are judged and their verdicts fetched, or the time has passed."""
        self._draining = True
        deadline = time.monotonic() + seconds
        while (self.waiting or self._running) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        deadline = min(deadline, time.monotonic() + LINGER_SECONDS)
        while time.monotonic() < deadline and any(
            entry.verdict.done() and not entry.fetched for entry in self._entries.values()
        ):
            await asyncio.sleep(0.05)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            entry = await self._waiting.get()
            answer = entry.answer
            assert answer is not None, "what waits is not judged"
            self._running.add(entry.key)
            since, out = time.monotonic(), self.counts["taken_out"]
            verdict = await loop.run_in_executor(self._threads, self._verdict_on, answer)
            self._running.remove(entry.key)
            self.judged_seconds += time.monotonic() - since
            if out != self.counts["taken_out"]:
                verdict = Verdict(None, Status.INFRA, self._fault or "the node was taken out")
            self._finish(entry, verdict)

    def _verdict_on(self, answer: Answer) -> Verdict:
        try:
            [verdict] = self._judge.judge([answer])
        except Exception as error:  # noqa: BLE001 - one odd job must not end the service, node after node
            return Verdict(None, Status.CRASH, f"the judge failed: {type(error).__name__}: {error}"[:500])
        return verdict

    def _finish(self, entry: Entry, verdict: Verdict) -> None:
        entry.answer = None
        entry.verdict.set_result(verdict)
        self.counts[verdict.status.value] += 1
        self._unproven.add(entry.key)
        self._finished[entry.key] = None
        if len(self._finished) > self._kept:
            oldest = next(iter(self._finished))
            del self._finished[oldest], self._entries[oldest]
            self._unproven.discard(oldest)

    def _retry_seconds(self) -> int:
        """About as long as half of the queue takes."""
        judged = sum(self.counts[status.value] for status in Status)
        mean = self.judged_seconds / judged if judged else 1.0
        return max(1, min(LONGEST_RETRY_SECONDS, math.ceil(mean * self.waiting / self._workers / 2)))


def _is_infra(entry: Entry) -> bool:
    return entry.verdict.done() and entry.verdict.result().status is Status.INFRA
