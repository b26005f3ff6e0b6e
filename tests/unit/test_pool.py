"""The worker pool against verifiers that hang, die, lie and pollute."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gppo_verifiers.errors import WorkerStartError
from gppo_verifiers.frames import FrameReader, encode
from gppo_verifiers.pool import WorkerPool, WorkerProcess
from gppo_verifiers.types import Answer, Status, Task, Verdict
from hypothesis import given, settings
from hypothesis import strategies as st

TABLE = "hostile_verifiers:VERIFIERS"
HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def path() -> Iterator[pytest.MonkeyPatch]:
    """Workers find the table beside this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HERE, prepend=os.pathsep)
        yield patch


@pytest.fixture(scope="module")
def pool(path: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    with WorkerPool(1, 1.5, TABLE, memory_bytes=1 << 29) as pool:
        yield pool


def answer(kind: str, text: str = "right", **payload: str) -> Answer:
    """For the verifier `kind` of the table; one of kind "compare" is right if its text is "right"."""
    return Answer(Task(kind, payload), text)


RIGHT, WRONG = answer("compare"), answer("compare", "wrong")


def gone(pid: int, seconds: float) -> bool:
    """Whether the process ends (or is but a zombie) within that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("kind", "status", "detail"),
    [
        ("sleep", Status.TIMEOUT, "still running after 1.5 s"),
        ("pow", Status.TIMEOUT, "still running after 1.5 s"),
        ("exit", Status.CRASH, "ended with exit code 3"),
        ("system_exit", Status.CRASH, "SystemExit: 4"),
        ("segfault", Status.CRASH, "killed by SIGSEGV"),
        ("raise", Status.CRASH, "RuntimeError: no such proof"),
        ("memory", Status.CRASH, "Cannot allocate memory"),
        ("nonsense", Status.CRASH, "float, not a Verdict"),
        ("nan", Status.CRASH, "ValueError: a score must lie in [0, 1], got nan"),
        ("garble", Status.CRASH, "process was killed"),
    ],
)
def test_a_failing_verifier_costs_its_own_answer_and_no_other(
    pool: WorkerPool, kind: str, status: Status, detail: str
) -> None:
    verdicts = pool.judge([RIGHT, WRONG, answer(kind), RIGHT, WRONG, RIGHT])
    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, None, 1.0, 0.0, 1.0]
    assert verdicts[2].status is status
    assert detail in verdicts[2].detail


def test_the_kernel_ends_an_answer_out_of_cpu_time_though_nobody_watches(path: pytest.MonkeyPatch) -> None:
    worker = WorkerProcess(TABLE, memory_bytes=1 << 29, cpu_seconds=1)
    try:
        worker.give(0, encode({"id": 0, "kind": "pow", "payload": {}, "text": ""}))
        while worker.sending:
            worker.exchange()
        assert worker.process.wait(timeout=60) == -signal.SIGXCPU
    finally:
        worker.kill()


@pytest.mark.parametrize("kind", ["pollute", "interrupt"])
def test_printing_and_ctrl_c_change_nothing(pool: WorkerPool, kind: str) -> None:
    verdicts = pool.judge([answer(kind), RIGHT, WRONG])
    assert [verdict.score for verdict in verdicts] == [1.0, 1.0, 0.0]


def test_waiting_for_a_worker_is_not_running(pool: WorkerPool) -> None:
    verdicts = pool.judge([answer("nap")] * 20)
    assert [verdict.score for verdict in verdicts] == [1.0] * 20


def test_every_answer_may_fail(pool: WorkerPool) -> None:
    verdicts = pool.judge([answer("exit"), answer("segfault"), answer("exit"), RIGHT])
    assert [verdict.score for verdict in verdicts] == [None, None, None, 1.0]


def test_order_and_texts_survive_many_answers_on_two_workers(path: pytest.MonkeyPatch) -> None:
    texts = [f"{place} é \ud800 \x00\n" * (1 + place % 7) for place in range(300)]
    texts[150] = "long " * 200_000
    with WorkerPool(2, 20.0, TABLE) as pool:
        verdicts = pool.judge(
            [answer("compare", text, right=text if place % 3 else "") for place, text in enumerate(texts)]
        )
        pids = {verdict.detail for verdict in pool.judge([answer("pid")] * 100)}
    assert [verdict.score for verdict in verdicts] == [float(place % 3 > 0) for place in range(300)]
    assert [verdict.detail for verdict in verdicts] == [text[:20] for text in texts]
    assert len(pids) == 2


def test_a_worker_lost_between_two_calls_is_replaced_without_blame(pool: WorkerPool) -> None:
    (before,) = pool.judge([answer("pid")])
    os.kill(int(before.detail), signal.SIGKILL)
    assert gone(int(before.detail), 2.0)
    (after,) = pool.judge([answer("pid")])
    assert after.score == 1.0
    assert after.detail != before.detail


def test_an_unknown_kind_is_the_judges_failure(pool: WorkerPool) -> None:
    (verdict,) = pool.judge([Answer(Task("chess"), "e4")])
    assert verdict == Verdict(None, Status.INFRA, verdict.detail)
    assert verdict.detail.startswith("no verifier for tasks of kind 'chess'; known: compare, ")


def test_no_answers_no_verdicts(pool: WorkerPool) -> None:
    assert pool.judge([]) == []


def test_a_worker_imports_neither_torch_nor_the_trainer(pool: WorkerPool) -> None:
    (verdict,) = pool.judge([answer("modules")])
    assert verdict.detail == ""
    program = "import sys, gppo_verifiers.kinds; print(sorted({'torch', 'gppo_megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("no_such_module:TABLE", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("hostile_verifiers:MISSING", "AttributeError"),
        ("hostile_verifiers:NOT_A_TABLE", "is int, not a table of verifiers"),
    ],
)
def test_a_worker_that_cannot_start_is_an_error(path: pytest.MonkeyPatch, table: str, message: str) -> None:
    with pytest.raises(WorkerStartError, match=message):
        WorkerPool(2, 1.0, table)


def test_a_worker_that_dies_at_start_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fatal_table.py").write_text("import os\nos._exit(5)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(WorkerStartError, match="cannot start: it ended with exit code 5"):
        WorkerPool(1, 1.0, "fatal_table:VERIFIERS")


def test_what_a_verifier_started_dies_with_it(pool: WorkerPool, tmp_path: Path) -> None:
    file = tmp_path / "child"
    (verdict,) = pool.judge([answer("child", file=str(file))])
    assert verdict.status is Status.TIMEOUT
    assert gone(int(file.read_text()), 30.0)


def test_close_leaves_no_process(path: pytest.MonkeyPatch) -> None:
    with WorkerPool(2, 1.0, TABLE) as pool:
        pids = {int(verdict.detail) for verdict in pool.judge([answer("pid")] * 100)}
    assert all(gone(pid, 30.0) for pid in pids)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.judge([RIGHT])


@pytest.mark.parametrize("kind", ["compare", "pow"])
def test_a_worker_ends_with_its_parent_idle_or_busy(path: pytest.MonkeyPatch, kind: str) -> None:
    program = (
        "import sys, time\n"
        "from gppo_verifiers.pool import WorkerPool\n"
        "from gppo_verifiers.types import Answer, Task\n"
        f"pool = WorkerPool(1, 3600.0, {TABLE!r})\n"
        "print(pool.judge([Answer(Task('pid'), '')])[0].detail, flush=True)\n"
        f"pool.judge([Answer(Task({kind!r}), '')])\n"
        "time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
        assert not gone(worker, 0.05)
        parent.kill()
        assert gone(worker, 30.0)


@pytest.mark.parametrize(("workers", "seconds"), [(0, 1.0), (1, 0.0)])
def test_a_pool_needs_a_worker_and_a_timeout(workers: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="needs a worker and a timeout"):
        WorkerPool(workers, seconds)


@settings(max_examples=50, deadline=None)
@given(messages=st.lists(st.dictionaries(st.text(), st.text() | st.integers())), size=st.integers(1, 9))
def test_frames_survive_any_cut(messages: list[dict[str, str | int]], size: int) -> None:
    stream = b"".join(map(encode, messages))
    reader = FrameReader()
    read = [message for start in range(0, len(stream), size) for message in reader.feed(stream[start : start + size])]
    assert read == messages
