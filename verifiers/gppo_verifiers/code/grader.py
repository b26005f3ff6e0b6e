"""Jobs to reports: runs the tests in a sandbox, and compares here, where programs cannot come."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gppo_verifiers.code.compare import same_text, same_value
from gppo_verifiers.code.harness import gppo_values
from gppo_verifiers.code.languages import BINARY, COMPILE_LIMITS, LANGUAGES, Language
from gppo_verifiers.code.turns import Turns
from gppo_verifiers.code.types import (
    AssertTest,
    CallTest,
    CheckerTest,
    Comparison,
    Job,
    JobState,
    Report,
    StdinTest,
    Test,
    TestResult,
    TestStatus,
)
from gppo_verifiers.sandbox.base import PYTHON, Cell, End, Facts, Limits, Program, Sandbox

ATTEMPTS = 3
"""How often a test is run whose run says nothing about the program."""
GRACE = 1.5
"""A program may run on for this many times its CPU limit. One that ends in between is measured again, alone."""
EXAMINER_LIMITS = Limits(cpu_seconds=30.0, wall_seconds=120.0, memory_bytes=1 << 30, file_bytes=128 << 20)
"""What a program printed is one of its files, six times as long where it prints what JSON has to escape."""
HARNESS = {
    path.name: path.read_bytes() for path in Path(__file__).with_name("harness").glob("*.py") if path.stem != "__init__"
}


class TaskInvalidError(Exception):
    """The tests are at fault."""


@dataclass(frozen=True)
class Built:
    """A program ready to run; limits: of one test, as the job gives them."""

    language: Language
    files: Mapping[str, bytes]
    limits: Limits


class Grader:
    """Grades one job at a time. turns: shared by all graders of a machine. Not thread-safe."""

    def __init__(self, sandbox: Sandbox, turns: Turns) -> None:
        self._turns = turns
        self._cell = sandbox.open_cell()
        try:
            self._examiner = sandbox.open_cell()
        except BaseException:
            self._cell.close()
            raise

    def close(self) -> None:
        self._cell.close()
        self._examiner.close()

    def grade(self, job: Job) -> Report:
        """The report on one program. Never raises for what the program, the tests or the sandbox do."""
        if not job.tests:
            return Report(JobState.TASK_INVALID, None, detail="there are no tests")
        language = LANGUAGES.get(job.language)
        if language is None:
            return Report(JobState.TASK_INVALID, None, detail=f"no language {job.language!r}: {', '.join(LANGUAGES)}")
        if not language.functions and any(isinstance(test, CallTest | AssertTest) for test in job.tests):
            return Report(JobState.TASK_INVALID, None, detail=f"functions of {job.language} cannot be called")
        built = self._build(language, job)
        if isinstance(built, TestResult):
            return _report(job, [built, *[TestResult(TestStatus.SKIPPED)] * (len(job.tests) - 1)])
        results: list[TestResult] = []
        try:
            for test in job.tests:
                left = job.total_cpu_seconds - sum(result.cpu_seconds for result in results)
                if left <= 0:
                    break
                results.append(self._settled(test, _with_at_most(built, left), job.comparison))
                if results[-1].status is TestStatus.INFRA:
                    break
                if job.score == "all" and results[-1].status is not TestStatus.AC:
                    break
        except TaskInvalidError as error:
            return Report(JobState.TASK_INVALID, None, tuple(results), f"test {len(results) + 1}: {error}")
        reason = f"all tests together may use {job.total_cpu_seconds:g} s of CPU" if left <= 0 else ""
        results += [TestResult(TestStatus.SKIPPED, reason)] * (len(job.tests) - len(results))
        return _report(job, results)

    def _build(self, language: Language, job: Job) -> Built | TestResult:
        """The program's files; a result where there is no program to run."""
        source = {language.source: job.source.encode("utf-8", "replace")}
        if language.compile is None:
            return Built(language, source, job.limits)
        script = f"{language.compile} 1>&2 && cat {BINARY}"
        program = Program(("/bin/sh", "-c", script), source, limits=COMPILE_LIMITS)
        for _ in range(ATTEMPTS):
            with self._turns.shared():
                facts = self._cell.run(program)
            if _failure(facts, COMPILE_LIMITS.cpu_seconds) is not TestStatus.INFRA:
                break
        else:
            return _result(TestStatus.INFRA, facts, facts.fault or "the machine was too busy to compile")
        if facts.end is not End.FINISHED or facts.exit_code != 0:
            return _result(TestStatus.CE, facts, facts.stderr[:500].decode("utf-8", "replace"))
        if len(facts.stdout) > job.limits.file_bytes:
            return _result(TestStatus.CE, facts, f"the executable is larger than {job.limits.file_bytes} bytes")
        return Built(language, {BINARY: facts.stdout}, job.limits)

    def _settled(self, test: Test, built: Built, comparison: Comparison) -> TestResult:
        """One test's result, run again where the first run says too little."""
        for _ in range(ATTEMPTS):
            with self._turns.shared():
                result = self._tried(test, built, comparison)
            if result.status is not TestStatus.INFRA:
                break
        limit = built.limits.cpu_seconds
        if result.status is TestStatus.AC and result.cpu_seconds > limit:
            with self._turns.alone():
                result = self._tried(test, built, comparison)
        if result.status is TestStatus.AC and result.cpu_seconds > limit:
            return replace(result, status=TestStatus.TLE, detail=f"more than {limit:g} s of CPU")
        return result

    def _tried(self, test: Test, built: Built, comparison: Comparison) -> TestResult:
        """One run. What fails in this process, for want of descriptors, memory or room, is no verdict."""
        try:
            return self._run(test, built, comparison)
        except (OSError, MemoryError, RuntimeError) as error:
            return TestResult(TestStatus.INFRA, f"the judge failed: {type(error).__name__}: {error}")

    def _run(self, test: Test, built: Built, comparison: Comparison) -> TestResult:
        match test:
            case StdinTest():
                return self._print(built, test.stdin, lambda text: _ac_if(same_text(test.expected, text, comparison)))
            case CheckerTest():
                return self._print(built, test.stdin, lambda text: self._check(test, text))
            case CallTest():
                return self._call(built, test, comparison)
            case AssertTest():
                return self._examine(built, test)

    def _print(self, built: Built, stdin: str, judge: Callable[[str], TestStatus]) -> TestResult:
        program = Program(
            built.language.run, built.files, stdin.encode("utf-8", "replace"), limits=_with_grace(built.limits)
        )
        facts = self._cell.run(program)
        failure = _failure(facts, program.limits.cpu_seconds) or _bad_end(facts)
        if failure is not None:
            return _result(failure, facts)
        return _result(judge(facts.stdout.decode("utf-8", "replace")), facts)

    def _check(self, test: CheckerTest, printed: str) -> TestStatus:
        """A checker that fails on an output and accepts the expected one has met a malformed output."""
        outcome = self._checked(test, printed)
        if outcome == "crashed" and (again := self._checked(test, test.expected)) != "accepted":
            if again != "infra":
                raise TaskInvalidError("its checker does not accept the expected output")
            outcome = again
        return {"accepted": TestStatus.AC, "infra": TestStatus.INFRA}.get(outcome, TestStatus.WA)

    def _checked(self, test: CheckerTest, printed: str) -> str:
        task = {"stdin": test.stdin, "stdout": printed, "expected": test.expected, "checker": test.checker}
        files = {"checker.py": HARNESS["checker.py"], "task.json": json.dumps(task).encode()}
        facts = self._examiner.run(Program((PYTHON, "checker.py"), files, limits=EXAMINER_LIMITS))
        if _failure(facts, EXAMINER_LIMITS.cpu_seconds) is TestStatus.INFRA:
            return "infra"
        return _outcome(facts)[0] or "crashed"

    def _call(self, built: Built, test: CallTest, comparison: Comparison) -> TestResult:
        try:
            request = gppo_values.encode((test.function, list(test.arguments), {})).encode() + b"\n"
        except gppo_values.UnsupportedError as error:
            raise TaskInvalidError(f"its arguments cannot be sent: {error}") from None
        program = Program(
            (PYTHON, "candidate.py"), _with_harness(built, "candidate.py"), request, limits=_with_grace(built.limits)
        )
        facts = self._cell.run(program)
        failure = _failure(facts, program.limits.cpu_seconds)
        if failure is not None:
            return _result(failure, facts)
        try:
            kind, *content = gppo_values.decode_unbuilt(facts.stdout)
        except (ValueError, TypeError):
            return _result(_bad_end(facts) or (TestStatus.WA if facts.stdout else TestStatus.RE), facts)
        if kind == "raised":
            return _result(TestStatus.RE, facts, _words(content))
        if kind != "value" or len(content) != 1:
            return _result(TestStatus.WA, facts, _words(content))
        right = any(same_value(expected, content[0], comparison) for expected in _wanted(test.expected))
        return _result(_ac_if(right), facts)

    def _examine(self, built: Built, test: AssertTest) -> TestResult:
        """Asserts in one cell, the program in the other, and two pipes between them."""
        task = {"function": test.function, "code": test.code, "setup": test.setup}
        names = ("examiner.py", "gppo_values.py")
        files = {name: HARNESS[name] for name in names} | {"task.json": json.dumps(task).encode()}
        requests_out, requests_in = os.pipe()
        try:
            replies_out, replies_in = os.pipe()
        except BaseException:
            os.close(requests_out)
            os.close(requests_in)
            raise
        examiner = Program((PYTHON, "examiner.py"), files, replies_out, requests_in, EXAMINER_LIMITS)
        candidate = Program(
            (PYTHON, "candidate.py"),
            _with_harness(built, "candidate.py"),
            requests_out,
            replies_in,
            _with_grace(built.limits),
        )
        seen, facts = _both(self._examiner, examiner, self._cell, candidate)
        outcome, detail = _outcome(seen)
        failure = _failure(facts, candidate.limits.cpu_seconds)
        if outcome == "invalid":
            raise TaskInvalidError(f"its asserts do not load: {detail}")
        if seen.end is End.FAULT:
            return _result(TestStatus.INFRA, facts, seen.fault)
        if failure is TestStatus.ILE and _starved(seen):
            return _result(TestStatus.INFRA, facts, "the machine was too busy for the asserts")
        if failure is not None:
            return _result(failure, facts)
        if outcome == "passed":
            return _result(TestStatus.AC, facts)
        if outcome == "lost":
            return _result(TestStatus.RE, facts, "it ended before it answered")
        status = _failure(seen, EXAMINER_LIMITS.cpu_seconds) or (TestStatus.WA if outcome else TestStatus.INFRA)
        return _result(status, facts, detail or ("" if outcome else "the asserts' process ended without a report"))


def _both(first: Cell, one: Program, second: Cell, other: Program) -> tuple[Facts, Facts]:
    """Run two programs at once, each in its cell."""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(second.run, other)
        facts = first.run(one)
        return facts, running.result()


def _with_at_most(built: Built, cpu_seconds: float) -> Built:
    return replace(built, limits=replace(built.limits, cpu_seconds=min(built.limits.cpu_seconds, cpu_seconds)))


def _with_grace(limits: Limits) -> Limits:
    cpu_seconds = limits.cpu_seconds * GRACE
    return replace(limits, cpu_seconds=cpu_seconds, wall_seconds=max(limits.wall_seconds, 4 * cpu_seconds))


def _with_harness(built: Built, name: str) -> dict[str, bytes]:
    return {**built.files, name: HARNESS[name], "gppo_values.py": HARNESS["gppo_values.py"]}


def _failure(facts: Facts, cpu_limit: float) -> TestStatus | None:
    """What a run that was ended from outside means; None for one that ended by itself."""
    match facts.end:
        case End.FAULT:
            return TestStatus.INFRA
        case End.OUTPUT_LIMIT:
            return TestStatus.OLE
        case End.CPU_LIMIT:
            return TestStatus.TLE
        case End.WALL_LIMIT if _starved(facts):
            # No program gets here by itself: while its threads wait for one another's cores they use CPU time, whose
            # limit is a quarter of the wall time.
            return TestStatus.INFRA
        case End.WALL_LIMIT:
            return TestStatus.ILE
    if facts.out_of_memory:
        return TestStatus.MLE
    return TestStatus.TLE if facts.cpu_seconds > cpu_limit else None


def _starved(facts: Facts) -> bool:
    return facts.waited_seconds > facts.wall_seconds / 2


def _bad_end(facts: Facts) -> TestStatus | None:
    return TestStatus.RE if facts.exit_code != 0 else None


def _outcome(facts: Facts) -> tuple[str, str]:
    """What a script of ours reported; empty where it did not get so far."""
    try:
        outcome, detail = json.loads(facts.stderr)
    except (ValueError, TypeError):
        return "", ""
    return str(outcome), str(detail)


def _words(content: Sequence[Any]) -> str:
    """What of a reply is text; all that a program that keeps the rules sends here is."""
    return ": ".join(part for part in content if isinstance(part, str))


def _wanted(expected: Any) -> list[Any]:
    """Many data sets write the result of a call as a list of one."""
    return [expected, *expected] if isinstance(expected, list) and len(expected) == 1 else [expected]


def _ac_if(right: bool) -> TestStatus:
    return TestStatus.AC if right else TestStatus.WA


def _result(status: TestStatus, facts: Facts, detail: str = "") -> TestResult:
    if not detail and status is TestStatus.RE:
        end = f"signal {facts.signal}" if facts.signal else f"exit code {facts.exit_code}"
        detail = f"{end}: {facts.stderr[-300:].decode('utf-8', 'replace').strip()}"
    # A program may have put half a surrogate pair into it, which no file could hold.
    detail = (detail or facts.fault).encode("utf-8", "replace").decode()
    return TestResult(status, detail, facts.cpu_seconds, facts.memory_peak_bytes)


def _report(job: Job, results: list[TestResult]) -> Report:
    statuses = [result.status for result in results]
    if TestStatus.INFRA in statuses:
        detail = next(result.detail for result in results if result.status is TestStatus.INFRA)
        return Report(JobState.INFRA_ERROR, None, tuple(results), detail or "the machine was too busy")
    share = statuses.count(TestStatus.AC) / len(statuses)
    worst = next((result for result in results if result.status is not TestStatus.AC), None)
    detail = f"{worst.status.value} {worst.detail}".strip() if worst else "AC"
    return Report(JobState.GRADED, share if job.score == "share" else float(share == 1.0), tuple(results), detail)
