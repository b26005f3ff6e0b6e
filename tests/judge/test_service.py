"""The service with its real sandbox: whatever is killed, full or cut, an answer gets its score or none, never another.

The one long-lived node has a queue of four jobs, and its disk is full from the start.
"""

import os
import signal
import subprocess
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
from gppo_verifiers.client import Patience, ServiceJudge
from gppo_verifiers.types import Answer, Status, Task

from gppo_megatron.build_judge import open_judge
from gppo_megatron.config.rollouts import EmbeddedRollout
from gppo_megatron.config.schema import FileData, Judge, RunConfig, ServiceCode, TinyModel
from gppo_megatron.errors import VerifierError
from tests.judge.services import free_port, losing, serving

TASK = Task("code", {"tests": [{"kind": "stdin", "stdin": f"{n} 2\n", "expected": f"{n + 2}\n"} for n in range(3)]})
RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"
WRONG = "```python\nprint(41)\n```"
PATIENCE = Patience(request_seconds=20.0, recovery_seconds=120.0)
OPTIONS = ("--port", "0", "--cpu-seconds", "1", "--memory-mib", "128")
BATCH = [RIGHT, WRONG, "no program"] * 8
SCORES = [1.0, 0.0, 0.0] * 8


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory):
    """A folder of a few KiB without a free byte."""
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(folder)], check=True)
    try:
        (folder / "filler").write_bytes(b"x" * 8192)
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_bytes(b"x")
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def node(full_disk):
    """(process, URL)."""
    places = dict.fromkeys(("TMPDIR", "HOME"), str(full_disk))
    with serving(*OPTIONS, "--queue", "4", environment=places, folder=full_disk) as found:
        yield found


def judge_at(*urls):
    return ServiceJudge(urls, None, PATIENCE)


def scores(judge, texts):
    return [verdict.score for verdict in judge.judge([Answer(TASK, text) for text in texts])]


def descendants(process):
    children = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=False).stdout
    return [one for child in map(int, children.split()) for one in (child, *descendants(child))]


def test_a_run_is_judged_by_the_service_it_names(node, monkeypatch):
    def config(url):
        return RunConfig(
            run="run",
            steps=1,
            model=TinyModel(),
            data=FileData(path="rows.jsonl", adapter="eurus2_code", template="python_block"),
            rollout=EmbeddedRollout(max_new_tokens=8),
            judge=Judge(code=ServiceCode(urls=(url,))),
        )

    judge = open_judge(config(node[1]))
    endless = Task("code", {**TASK.payload, "cpu_seconds": 0.2})
    answers = [
        Answer(TASK, RIGHT),
        Answer(endless, "```python\nwhile True: pass\n```"),
        Answer(Task("code", {}), RIGHT),
    ]
    answers.append(Answer(Task("math", {"gold": "5", "extractor": "boxed"}), "\\boxed{5}"))
    verdicts = judge.judge(answers)
    judge.close()
    assert [(verdict.score, verdict.status) for verdict in verdicts] == [
        (1.0, Status.GRADED),
        (0.0, Status.GRADED),
        (None, Status.CRASH),
        (1.0, Status.GRADED),
    ]
    with pytest.raises(VerifierError, match="judge.code: no verifier service answers: .*ConnectError"):
        open_judge(config(f"http://127.0.0.1:{free_port()}"))


def test_a_full_queue_only_takes_longer(node):
    judge = judge_at(node[1])
    before = httpx.get(node[1] + "/metrics").text
    assert scores(judge, BATCH) == SCORES
    assert refused(httpx.get(node[1] + "/metrics").text) > refused(before)


def refused(metrics):
    [line] = [line for line in metrics.splitlines() if line.startswith("gppo_verifier_refused_jobs_total")]
    return int(line.split()[1])


def test_a_lost_connection_costs_nothing(node):
    with losing(node[1], losses=3) as url:
        assert scores(judge_at(url), [RIGHT, WRONG, "no program"]) == [1.0, 0.0, 0.0]


def test_killed_sandbox_processes_are_replaced(node):
    process, url = node
    results = []
    thread = threading.Thread(target=lambda: results.append(scores(judge_at(url), [RIGHT, WRONG, RIGHT, WRONG])))
    thread.start()
    killed = 0
    while thread.is_alive() and killed < 6:
        for victim in descendants(process.pid):
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed += 1
        time.sleep(0.3)
    thread.join()
    assert killed
    assert all(score in (None, right) for score, right in zip(results[0], [1.0, 0.0] * 2, strict=True))
    assert scores(judge_at(url), [RIGHT, WRONG]) == [1.0, 0.0]


def test_a_killed_service_is_asked_again_once_it_is_back():
    port = str(free_port())
    with ExitStack() as services:
        process, url = services.enter_context(serving(*OPTIONS, "--port", port))
        judge, results = judge_at(url), []
        thread = threading.Thread(target=lambda: results.append(scores(judge, BATCH)))
        thread.start()
        while 'status="graded"} 0' in httpx.get(url + "/metrics").text:
            time.sleep(0.01)
        process.kill()
        process.wait()
        services.enter_context(serving(*OPTIONS, "--port", port))
        thread.join()
    assert results == [SCORES]


def test_another_service_takes_over_and_sigterm_ends_one_after_its_jobs(node):
    with serving(*OPTIONS) as (process, url):
        results = []
        thread = threading.Thread(target=lambda: results.append(scores(judge_at(url, node[1]), BATCH)))
        thread.start()
        while 'status="graded"} 0' in httpx.get(url + "/metrics").text:
            time.sleep(0.01)
        process.terminate()
        thread.join()
        assert process.wait(120) == 0
    assert results == [SCORES]
