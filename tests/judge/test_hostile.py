"""What comes out of a sandbox holds up and breaks nothing in the judge, whoever wrote it. Times are CPU times."""

import errno
import os
import time
from contextlib import contextmanager

import pytest
from gppo_verifiers.code.extract import last_block
from gppo_verifiers.code.grader import Grader
from gppo_verifiers.code.harness.gppo_values import encode
from gppo_verifiers.code.turns import Turns
from gppo_verifiers.code.types import AssertTest, CallTest, CheckerTest, Comparison, Job, JobState, TestStatus
from gppo_verifiers.sandbox.base import End, Facts, Limits
from gppo_verifiers.sandbox.watch import run_watched
from gppo_verifiers.sandbox.zygote import ZygoteSandbox

from tests.judge.cases import python
from tests.judge.test_faults import ASLEEP, BROKEN, RIGHT, STARVED, Scripted

COLLIDING = [number * (2**61 - 1) for number in range(1, 45_000)]
"""All have the hash 0."""


@contextmanager
def little_cpu():
    """Far less than time quadratic in a megabyte, far more than time linear in it: 0.2 s."""
    began = time.process_time()
    yield
    assert time.process_time() - began < 5


def called(stdout, expected, mode="lines"):
    job = Job("", (CallTest("f", [], expected),), comparison=Comparison(mode))
    sandbox = Scripted(Facts(End.FINISHED, exit_code=0, stdout=stdout, cpu_seconds=0.1))
    return Grader(sandbox, Turns()).grade(job)


@pytest.mark.parametrize("kind", ["d", "s"])
def test_keys_with_one_hash_cost_little(kind):
    items = [[key, 0] for key in COLLIDING] if kind == "d" else COLLIDING
    line = f'["t", ["value", ["{kind}", {items}]]]'.encode()
    with little_cpu():
        assert called(line, {"a": 1}).results[0].status is TestStatus.WA


def test_a_table_with_such_keys_is_still_compared():
    line = encode(("value", {key: key % 7 for key in COLLIDING[:100]})).encode()
    expected = {str(key): key % 7 for key in COLLIDING[:100]}
    assert called(line, expected).score == 1.0
    assert called(line, expected | {str(COLLIDING[5]): 9}).score == 0.0


def test_lists_in_any_order_cost_little():
    values = [[number, str(number)] for number in range(40_000)]
    line = encode(("value", values[::-1])).encode()
    with little_cpu():
        assert called(line, values, "unordered").score == 1.0
        assert called(line, [*values[:-1], [0, "0"]], "unordered").score == 0.0


@pytest.mark.parametrize("mark", ["```", "~~~"])
@pytest.mark.parametrize("letter", ["a", "`", "~", " ", "`a", "~ "])
def test_a_fence_that_is_none_costs_little(mark, letter):
    with little_cpu():
        assert last_block(mark + letter * 500_000 + "`\n", ["python"]) is None


@pytest.mark.parametrize(
    "line",
    [
        '["t", ["raised", ["i", "0x1' + "0" * 5000 + '"], "x"]]',
        '["t", ["raised"]]',
        '["t", ["raised", 1, 2, 3]]',
        '["t", ["unsupported", ["i", "0x1' + "0" * 5000 + '"]]]',
        '["t", [["l", []], 1]]',
        '["t", ["value", ["c", [1' + "0" * 400 + ", 0]]]]",
        '["t", ["value", ["d", [[["i", "0x1' + "0" * 5000 + '"], 1]]]]]',
        '["t", ["value", ["d", [[["l", []], 1]]]]]',
        '["t", ["value", NaN]]',
        '["t", []]',
        '["d", []]',
        "1" * 5000,
        "null",
        "[[[[",
        "\x00",
    ],
)
@pytest.mark.parametrize("mode", ["lines", "floats", "unordered"])
def test_a_forged_reply_is_a_wrong_answer(line, mode):
    report = called(line.encode(), {"a": [1, 2]}, mode)
    assert report.state is JobState.GRADED
    assert report.results[0].status in (TestStatus.WA, TestStatus.RE)


CHECKED = Job("", (CheckerTest("", "def check(*_): return True", "1"),))
ASSERTED = Job("", (AssertTest("f", "assert f()"),))
CRASHED = Facts(End.FINISHED, exit_code=0, stderr=b'["crashed", ""]')
ENDED = Facts(End.FINISHED, exit_code=1)


@pytest.mark.parametrize(
    ("job", "facts"),
    [
        (CHECKED, [RIGHT, STARVED] * 3),
        (CHECKED, [RIGHT, CRASHED, BROKEN] * 3),
        (CHECKED, [RIGHT, CRASHED, STARVED] * 3),
    ],
)
def test_a_checker_that_could_not_run_gives_no_verdict(job, facts):
    assert Grader(Scripted(*facts), Turns()).grade(job).state is JobState.INFRA_ERROR


@pytest.mark.parametrize(("seen", "facts"), [(STARVED, ASLEEP), (ENDED, RIGHT), (BROKEN, RIGHT)])
def test_asserts_that_could_not_run_give_no_verdict(seen, facts):
    class Two(Scripted):
        def run(self, program):
            for descriptor in (program.stdin, program.stdout):
                os.close(descriptor)
            return seen if "examiner.py" in program.files else facts

    assert Grader(Two(), Turns()).grade(ASSERTED).state is JobState.INFRA_ERROR


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError()])
def test_what_the_judge_lacks_gives_no_verdict_and_leaves_nothing_open(error, monkeypatch):
    pipes, pipe = [], os.pipe

    def failing():
        if len(pipes) % 2:
            pipes.append(None)
            raise error
        pipes.append(pipe())
        return pipes[-1]

    monkeypatch.setattr(os, "pipe", failing)
    report = Grader(Scripted(), Turns()).grade(ASSERTED)
    assert report.state is JobState.INFRA_ERROR
    assert len(pipes) == 6
    for descriptor in {descriptor for ends in pipes if ends for descriptor in ends}:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), ValueError("no such key"), MemoryError()])
def test_a_control_group_that_cannot_be_made_is_a_fault(error):
    class Failing:
        def create(self, limits):
            raise error

    class Runner:
        def finish(self, failed):
            assert failed

    facts = run_watched(python("", limits=Limits()), Failing(), Runner, 0)
    assert facts.end is End.FAULT


@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), ValueError("it does not tell usage_usec"), MemoryError()])
def test_a_control_group_that_cannot_be_read_is_a_fault(error, monkeypatch):
    def failing(group):
        raise error

    for name in ("VersionOneGroup", "VersionTwoGroup"):
        monkeypatch.setattr(f"gppo_verifiers.sandbox.cgroups.{name}.out_of_memory", failing)
    sandbox = ZygoteSandbox()
    try:
        cell = sandbox.open_cell()
        assert cell.run(python("print(1)")).end is End.FAULT
        cell.close()
    finally:
        sandbox.close()
