"""Payloads to jobs, judges by kind, and the turns that graders take."""

import threading
import time

import pytest
from gppo_verifiers.code.jobs import job_of
from gppo_verifiers.code.turns import Turns
from gppo_verifiers.code.types import AssertTest, CallTest, CheckerTest, Comparison, StdinTest
from gppo_verifiers.routing import ByKind
from gppo_verifiers.sandbox.base import Limits
from gppo_verifiers.types import Answer, Status, Task, Verdict

STDIN = {"kind": "stdin", "stdin": "1", "expected": "2"}
ANSWER = "```python\nprint(2)\n```"


def test_a_payload_with_everything():
    payload = {
        "tests": [
            STDIN,
            {"kind": "call", "function": "f", "arguments": [1], "expected": 2},
            {"kind": "assert", "function": "f", "code": "assert f(1)"},
            {"kind": "checker", "stdin": "", "checker": "def check(): ...", "expected": "1"},
        ],
        "score": "share",
        "comparison": {"mode": "floats", "absolute": 1e-3},
        "cpu_seconds": 5,
        "total_cpu_seconds": 30,
        "memory_bytes": 1 << 28,
    }
    job = job_of(payload, ANSWER, Limits())
    assert job.source == "print(2)\n"
    assert job.tests == (
        StdinTest("1", "2"),
        CallTest("f", [1], 2),
        AssertTest("f", "assert f(1)"),
        CheckerTest("", "def check(): ...", "1"),
    )
    assert (job.language, job.score, job.total_cpu_seconds) == ("python", "share", 30.0)
    assert job.comparison == Comparison("floats", 1e-3, 1e-6)
    assert job.limits == Limits(cpu_seconds=5.0, wall_seconds=20.0, memory_bytes=1 << 28)


def test_limits_that_a_payload_does_not_set_are_the_judges():
    limits = Limits(cpu_seconds=2.0, wall_seconds=10.0, processes=7)
    assert job_of({"tests": [STDIN]}, ANSWER, limits).limits == limits


def test_an_answer_without_a_program_has_no_job():
    assert job_of({"tests": [STDIN]}, "print(2)", Limits()) is None
    assert job_of({"tests": [STDIN], "answer": "whole"}, "<think>no</think>print(2)", Limits()).source == "print(2)"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"tests": [STDIN], "test": 1}, "no test"),
        ({"tests": [STDIN], "total_cpu_seconds": 0}, "total_cpu_seconds must be > 0"),
        ({"tests": [STDIN], "language": "cobol"}, "no language 'cobol'"),
        ({"tests": [STDIN], "score": "some"}, "`all` or `share`"),
        ({"tests": [STDIN], "answer": "last"}, "`fenced` or `whole`"),
        ({"tests": [{"stdin": "1", "expected": "2"}]}, "a test has a kind"),
        ({"tests": [{"kind": "stdin", "stdin": "1"}]}, "incomplete.*expected"),
        ({"tests": [{**STDIN, "weight": 2}]}, "weight"),
        ({"tests": [{**STDIN, "kind": ["stdin"]}]}, "a test has a kind"),
        ({"tests": [{**STDIN, "stdin": 1}]}, "the stdin of a test is a int, not a str"),
        ({"tests": [{"kind": "call", "function": "f", "arguments": "12", "expected": 1}]}, "arguments.*not a list"),
        ({"tests": [STDIN], "comparison": {"mode": "fuzzy"}}, "not 'fuzzy'"),
        ({"tests": [STDIN], "comparison": {"epsilon": 1}}, "epsilon"),
        ({"tests": [STDIN], "cpu_seconds": 0}, "cpu_seconds must be > 0"),
    ],
)
def test_a_payload_that_is_none_says_why(payload, message):
    with pytest.raises(ValueError, match=message):
        job_of(payload, ANSWER, Limits())


class Named:
    """A judge that says which answers it got."""

    def __init__(self, name):
        self.name, self.closed = name, False

    def judge(self, answers):
        return [Verdict(1.0, Status.GRADED, f"{self.name} {answer.text}") for answer in answers]

    def close(self):
        self.closed = True


def test_answers_go_to_the_judge_of_their_kind_and_come_back_in_order():
    code, rest = Named("code"), Named("rest")
    judge = ByKind({"code": code}, rest)
    answers = [Answer(Task(kind), str(place)) for place, kind in enumerate(("math", "code", "code", "zebra"))]
    assert [verdict.detail for verdict in judge.judge(answers)] == ["rest 0", "code 1", "code 2", "rest 3"]
    assert judge.judge([]) == []
    judge.close()
    assert code.closed
    assert rest.closed


def test_one_that_wants_to_be_alone_is_alone_and_is_not_starved():
    turns, running, most, alone_saw = Turns(), 0, 0, []
    lock = threading.Lock()
    stop = threading.Event()

    def share():
        nonlocal running, most
        while not stop.is_set():
            with turns.shared():
                with lock:
                    running += 1
                    most = max(most, running)
                time.sleep(0.001)
                with lock:
                    running -= 1

    threads = [threading.Thread(target=share) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        with turns.alone():
            alone_saw.append(running)
            time.sleep(0.001)
            alone_saw.append(running)
    stop.set()
    for thread in threads:
        thread.join()
    assert set(alone_saw) == {0}
    assert most > 1
