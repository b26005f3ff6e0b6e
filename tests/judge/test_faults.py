"""A sandbox that fails, or a machine too busy to tell, ends in no score, and the next run works again."""

import errno
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from gppo_verifiers.code import grader as grading
from gppo_verifiers.code.grader import Grader
from gppo_verifiers.code.judge import CodeJudge
from gppo_verifiers.code.turns import Turns
from gppo_verifiers.code.types import AssertTest, CallTest, CheckerTest, Job, JobState, StdinTest, TestStatus
from gppo_verifiers.sandbox.base import End, Facts, IsolationError, Limits
from gppo_verifiers.sandbox.zygote import ZygoteSandbox
from gppo_verifiers.types import Answer, Status, Task

from tests.judge.cases import python

JOB = Job("print(input())", (StdinTest("1", "1"),))
RIGHT = Facts(End.FINISHED, exit_code=0, stdout=b"1\n", cpu_seconds=0.1, wall_seconds=0.1)
BROKEN = Facts(End.FAULT, fault="the machine is on fire")
STARVED = Facts(End.WALL_LIMIT, signal=9, cpu_seconds=0.5, wall_seconds=16.0, waited_seconds=12.0)
ASLEEP = replace(STARVED, waited_seconds=1.0)


class Scripted:
    """A sandbox whose runs end as they are told to; it plays both a sandbox and its cells."""

    name = "scripted"

    def __init__(self, *facts):
        self.facts = list(facts)

    def open_cell(self):
        return self

    def run(self, program):
        facts = self.facts.pop(0)
        if isinstance(facts, Exception):
            raise facts
        return facts

    def close(self):
        pass


@pytest.mark.parametrize(
    ("facts", "state", "status"),
    [
        ([BROKEN, RIGHT], JobState.GRADED, TestStatus.AC),
        ([BROKEN, STARVED, RIGHT], JobState.GRADED, TestStatus.AC),
        ([BROKEN, BROKEN, BROKEN], JobState.INFRA_ERROR, TestStatus.INFRA),
        ([OSError(errno.EMFILE, "too many files"), MemoryError(), RIGHT], JobState.GRADED, TestStatus.AC),
        ([OSError(errno.ENOSPC, "no room")] * 3, JobState.INFRA_ERROR, TestStatus.INFRA),
        ([STARVED, STARVED, STARVED], JobState.INFRA_ERROR, TestStatus.INFRA),
        ([ASLEEP], JobState.GRADED, TestStatus.ILE),
        # Between the limit of 4 s and the kill at 6 s a run is measured again, alone.
        ([replace(RIGHT, cpu_seconds=4.5), replace(RIGHT, cpu_seconds=3.9)], JobState.GRADED, TestStatus.AC),
        ([replace(RIGHT, cpu_seconds=4.5), replace(RIGHT, cpu_seconds=4.4)], JobState.GRADED, TestStatus.TLE),
        ([replace(RIGHT, cpu_seconds=6.1)], JobState.GRADED, TestStatus.TLE),
        ([replace(RIGHT, out_of_memory=True)], JobState.GRADED, TestStatus.MLE),
        ([replace(RIGHT, stdout=b"2\n", cpu_seconds=4.5)], JobState.GRADED, TestStatus.WA),
    ],
)
def test_what_a_run_says_about_the_program(facts, state, status):
    sandbox = Scripted(*facts)
    report = Grader(sandbox, Turns()).grade(JOB)
    assert (report.state, report.results[0].status) == (state, status)
    assert (report.score is None) == (state is JobState.INFRA_ERROR)
    assert sandbox.facts == []


ACCEPTED, CRASHED = (replace(RIGHT, stderr=b'["%s", ""]' % outcome) for outcome in (b"accepted", b"crashed"))


@pytest.mark.parametrize(
    ("facts", "state", "status"),
    [
        ([RIGHT, STARVED, RIGHT, ACCEPTED], JobState.GRADED, TestStatus.AC),
        ([RIGHT, CRASHED, STARVED] * 3, JobState.INFRA_ERROR, TestStatus.INFRA),
        ([RIGHT, CRASHED, ACCEPTED], JobState.GRADED, TestStatus.WA),
        ([RIGHT, CRASHED, CRASHED], JobState.TASK_INVALID, None),
    ],
)
def test_a_checker_that_had_no_core_refuses_nothing(facts, state, status):
    sandbox = Scripted(*facts)
    report = Grader(sandbox, Turns()).grade(Job("", (CheckerTest("", "", "1"),)))
    assert report.state is state, report
    assert [result.status for result in report.results] == ([status] if status else [])
    assert sandbox.facts == []


class Paired:
    """A sandbox of two kinds of cells, first one for the program, then one for the asserts."""

    name = "paired"

    def __init__(self, program, asserts):
        self.cells = [Scripted(*program), Scripted(*asserts)]

    def open_cell(self):
        return self.cells.pop(0)


def test_a_program_is_not_idle_where_its_asserts_had_no_core():
    job = Job("", (AssertTest("f", "assert f()"),))
    report = Grader(Paired([ASLEEP] * 3, [STARVED] * 3), Turns()).grade(job)
    assert (report.state, report.score) == (JobState.INFRA_ERROR, None)
    report = Grader(Paired([ASLEEP], [replace(RIGHT, stderr=b'["lost", ""]')]), Turns()).grade(job)
    assert [result.status for result in report.results] == [TestStatus.ILE]


def test_all_tests_together_have_a_limit():
    job = Job(JOB.source, JOB.tests * 4, score="share", total_cpu_seconds=1.0)
    report = Grader(Scripted(*[replace(RIGHT, cpu_seconds=0.5)] * 2), Turns()).grade(job)
    assert [result.status.value for result in report.results] == ["AC", "AC", "SKIPPED", "SKIPPED"]
    assert (report.score, report.detail) == (0.5, "SKIPPED all tests together may use 1 s of CPU")
    over = [replace(RIGHT, cpu_seconds=0.9), replace(RIGHT, cpu_seconds=0.5)]
    report = Grader(Scripted(*over), Turns()).grade(replace(job, score="all"))
    assert [result.status.value for result in report.results] == ["AC", "TLE", "SKIPPED", "SKIPPED"]
    assert report.score == 0.0


def test_a_fault_ends_a_job_even_where_another_test_passed():
    job = Job(JOB.source, (*JOB.tests, *JOB.tests), score="share")
    report = Grader(Scripted(RIGHT, BROKEN, BROKEN, BROKEN), Turns()).grade(job)
    assert report.state is JobState.INFRA_ERROR
    assert report.score is None
    assert report.detail == "the machine is on fire"


def test_the_judge_gives_faults_no_score_and_every_other_outcome_its_status(monkeypatch):
    monkeypatch.setattr("gppo_verifiers.code.judge.require", lambda sandbox, languages: None)
    judge = CodeJudge(Scripted(BROKEN, BROKEN, BROKEN, RIGHT), 1, Limits(), ["python"])
    task = Task("code", {"tests": [{"kind": "stdin", "stdin": "1", "expected": "1"}]})
    program = "```python\nprint(1)\n```"
    odd = [{"tests": []}, {"test": 1}, {"tests": 3}, {"tests": [3]}, {"tests": [], "cpu_seconds": None}]
    tasks = [task, task, task, *(Task("code", payload) for payload in odd)]
    texts = [program, program, "no program", *[program] * len(odd)]
    verdicts = judge.judge([Answer(task, text) for task, text in zip(tasks, texts, strict=True)])
    assert [(verdict.score, verdict.status) for verdict in verdicts] == [
        (None, Status.INFRA),
        (1.0, Status.GRADED),
        (0.0, Status.UNPARSABLE),
        *[(None, Status.CRASH)] * len(odd),
    ]
    judge.close()
    judge.close()


def test_text_that_no_file_can_hold_stops_nobody():
    """Half of a surrogate pair: from a data set on standard input, and from a program in its exception."""
    job = Job("print(input())", (StdinTest("\ud800", "?"),))
    assert Grader(Scripted(replace(RIGHT, stdout=b"?\n")), Turns()).grade(job).score == 1.0
    raised = replace(RIGHT, stdout=b'["t", ["raised", "ValueError", "\\ud800"]]\n')
    report = Grader(Scripted(raised), Turns()).grade(Job("", (CallTest("f", [], 1),)))
    assert report.detail == "RE ValueError: ?"


def servers():
    """The fork servers and supervisors of this process's judges."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/cmdline") as file:
                command = file.read()
            with open(f"/proc/{process}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if "zygote_server" in command:
            found.append((int(process), parent))
    return found


@pytest.fixture
def zygote():
    sandbox = ZygoteSandbox()
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize("victim", ["server", "supervisor"])
def test_a_killed_process_of_the_sandbox_is_a_fault_and_the_next_run_works(zygote, victim):
    cell = zygote.open_cell()
    try:
        [server] = [process for process, parent in servers() if parent == os.getpid()]
        results = []
        thread = threading.Thread(
            target=lambda: results.append(cell.run(python("import time\nprint('x', flush=True)\ntime.sleep(60)")))
        )
        thread.start()
        deadline = time.monotonic() + 30
        while not (children := [process for process, parent in servers() if parent == server]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(server if victim == "server" else children[0], signal.SIGKILL)
        if victim == "server":  # its supervisor goes on alone; then there is nobody to start the next run
            os.kill(children[0], signal.SIGKILL)
        thread.join(30)
        assert results[0].end is End.FAULT
        assert cell.run(python("print(2)")).stdout == b"2\n"
        living = [process for process, parent in servers() if parent == os.getpid()]
        assert len(living) == 1
    finally:
        cell.close()
    assert not [process for process, parent in servers() if parent == os.getpid()]


def test_without_root_there_is_no_sandbox(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(IsolationError, match="needs Linux and root"):
        ZygoteSandbox()


def test_a_server_that_cannot_build_its_jail_says_why(zygote, monkeypatch):
    monkeypatch.setattr("gppo_verifiers.sandbox.zygote.PRELOAD", ("no_such_module",))
    with pytest.raises(IsolationError, match="no_such_module"):
        zygote.open_cell()


def test_the_harness_is_complete():
    assert set(grading.HARNESS) == {"candidate.py", "checker.py", "examiner.py", "gppo_values.py"}
