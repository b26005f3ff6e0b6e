"""Judges tasks of kind `code`, several at once, in a sandbox of this machine."""

import queue
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from gppo_verifiers.code.grader import Grader
from gppo_verifiers.code.jobs import job_of
from gppo_verifiers.code.selftest import require
from gppo_verifiers.code.turns import Turns
from gppo_verifiers.code.types import JobState, Report
from gppo_verifiers.sandbox.base import Limits, Sandbox
from gppo_verifiers.types import Answer, Status, Verdict

STATUSES = {
    JobState.GRADED: Status.GRADED,
    JobState.INFRA_ERROR: Status.INFRA,
    JobState.TASK_INVALID: Status.CRASH,
}

UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What reading a payload may raise, which may be anything."""


class CodeJudge:
    """Implements `Judge`, and takes the sandbox over. Each worker has two cells, for a program and for its examiner.

    limits: of a test, where its task sets none. languages: those that tasks may ask for; each is tried at the start.
    Raises IsolationError where a cell does not open, or the sandbox fails its self-test.
    """

    def __init__(self, sandbox: Sandbox, workers: int, limits: Limits, languages: Collection[str]) -> None:
        if workers < 1:
            raise ValueError(f"needs at least one worker, got {workers}")
        try:
            require(sandbox, languages)
        except BaseException:
            sandbox.close()
            raise
        self._languages = languages
        self._sandbox = sandbox
        self._limits = limits
        self._graders: list[Grader] = []
        self._free: queue.SimpleQueue[Grader] = queue.SimpleQueue()
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="judge")
        turns = Turns()
        try:
            for _ in range(workers):
                self._graders.append(Grader(sandbox, turns))
                self._free.put(self._graders[-1])
        except BaseException:
            self.close()
            raise

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return list(self._executor.map(self._judge_one, answers))

    def close(self) -> None:
        """Wait for what is being judged, and remove every trace; may be called twice."""
        self._executor.shutdown(cancel_futures=True)
        while self._graders:
            self._graders.pop().close()
        self._sandbox.close()

    def _judge_one(self, answer: Answer) -> Verdict:
        try:
            job = job_of(answer.task.payload, answer.text, self._limits, self._languages)
        except UNREADABLE as error:
            return Verdict(None, Status.CRASH, f"the task cannot be judged: {error}")
        if job is None:
            return Verdict(0.0, Status.UNPARSABLE, "no program found")
        grader = self._free.get()
        try:
            return verdict_of(grader.grade(job))
        finally:
            self._free.put(grader)


def verdict_of(report: Report) -> Verdict:
    """The report as the trainer sees it."""
    return Verdict(report.score, STATUSES[report.state], report.detail[:500])
