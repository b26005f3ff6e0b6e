"""The math verifier in the real worker pool: nothing outlives its deadline, and every failure has its own status."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from gppo_verifiers.pool import WorkerPool
from gppo_verifiers.types import Answer, Status, Task

SECONDS = 1.5
SLACK = 1.5
"""For a process that must be killed and answered for, on a busy machine."""
SLOW = r"\boxed{\Gamma(99999999)}"
SLOW_SUM = r"\boxed{\prod_{k=1}^{999}\prod_{j=1}^{999}\frac{1}{(k+j)!}}"


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, SECONDS) as pool:
        warm_up = pool.judge([answer("x+1", r"\boxed{1+x}")] * 2)
        assert warm_up[1].score == 1.0
        yield pool


def answer(gold: str, text: str) -> Answer:
    return Answer(Task("math", {"gold": gold, "extractor": "boxed"}), text)


@pytest.mark.parametrize(
    "content",
    [
        r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}",
        "5^{5^{5^{5^5}}}",
        "10^{10^{10}}",
        "2^2^2^2^2^2",
        "9999999!",
        r"\sum_{k=1}^{10^{9}} \frac{1}{k!}",
        "(" * 300 + "1" + ")" * 300,
        "+".join(["1"] * 3000),
    ],
    ids=lambda content: content[:16],
)
def test_what_is_known_to_hang_is_refused_at_once(pool: WorkerPool, content: str) -> None:
    start = time.monotonic()
    [verdict] = pool.judge([answer("5", f"\\boxed{{{content}}}")])
    assert (verdict.score, verdict.status) == (0.0, Status.UNPARSABLE)
    assert time.monotonic() - start < SECONDS


@pytest.mark.parametrize("text", [SLOW, SLOW_SUM])
def test_what_is_merely_slow_ends_at_its_deadline_without_a_score(pool: WorkerPool, text: str) -> None:
    start = time.monotonic()
    verdicts = pool.judge([answer("5", text), answer("5", r"\boxed{5}")])
    assert [verdict.status for verdict in verdicts] == [Status.TIMEOUT, Status.GRADED]
    assert verdicts[0].score is None
    assert time.monotonic() - start < SECONDS + SLACK + 60.0  # the second answer waits for a new worker to start


def test_an_unreadable_gold_answer_gives_no_score(pool: WorkerPool) -> None:
    [verdict] = pool.judge([answer(r"\frac{1}{", r"\boxed{\frac{1}{}}")])
    assert (verdict.score, verdict.status) == (None, Status.CRASH)
    assert "cannot be read" in verdict.detail


def test_a_worker_killed_by_hand_costs_one_answer(pool: WorkerPool) -> None:
    worker = pool._workers[0].process.pid
    killer = threading.Timer(0.5, os.kill, (worker, signal.SIGKILL))
    killer.start()
    verdicts = pool.judge([answer("5", SLOW), answer("5", r"\boxed{5}"), answer("5", r"\boxed{6}")])
    killer.join()
    assert [verdict.score for verdict in verdicts] == [None, 1.0, 0.0]
    assert verdicts[0].status is Status.CRASH
    assert "SIGKILL" in verdicts[0].detail


def test_200_queued_at_once_keep_their_own_statuses(pool: WorkerPool) -> None:
    kinds = [
        answer("5", r"\boxed{5}"),
        answer(r"\sqrt{8}", r"\boxed{2\sqrt{2}}"),
        answer("x^2-1", r"\boxed{(x-1)(x+2)}"),
        answer("5", "no box"),
        answer(r"\frac{1}{", r"\boxed{1}"),
    ]
    answers = kinds * 39 + [answer("5", SLOW)] + kinds[:4]
    verdicts = pool.judge(answers)
    assert Counter((verdict.status, verdict.score) for verdict in verdicts) == {
        (Status.GRADED, 1.0): 80,
        (Status.GRADED, 0.0): 40,
        (Status.UNPARSABLE, 0.0): 40,
        (Status.CRASH, None): 39,
        (Status.TIMEOUT, None): 1,
    }
