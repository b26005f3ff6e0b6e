"""The Docker engine is killed, and comes back: answers get their score or none, and the judge goes on by itself."""

import os
import signal

from gppo_verifiers.code.judge import CodeJudge
from gppo_verifiers.sandbox.base import Limits
from gppo_verifiers.sandbox.docker import DockerSandbox
from gppo_verifiers.types import Answer, Status, Task

from tests.judge.engine import engine
from tests.judge.soak import descendants

TASK = Task("code", {"tests": [{"kind": "stdin", "stdin": "1 2\n", "expected": "3\n"}]})
RIGHT = "```python\nprint(sum(map(int, input().split())))\n```"
WRONG = "```python\nprint(41)\n```"


def verdicts(judge):
    return [(verdict.score, verdict.status) for verdict in judge.judge([Answer(TASK, RIGHT), Answer(TASK, WRONG)])]


def fork_servers():
    """Those in containers: children of nobody of ours."""
    ours = descendants()
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/cmdline") as file:
                command = file.read()
        except OSError:
            continue
        if "zygote_server" in command and "/channel/socket" in command and int(process) not in ours:
            found.append(int(process))
    return found


def test_a_killed_docker_engine_costs_no_answer_a_wrong_score():
    scored = [(1.0, Status.GRADED), (0.0, Status.GRADED)]
    with engine() as running:
        judge = CodeJudge(DockerSandbox(), 1, Limits(cpu_seconds=2.0, wall_seconds=30.0), ["python"])
        assert verdicts(judge) == scored
        running.kill()
        assert verdicts(judge) == scored, "its containers live on without it"
        for process in fork_servers():
            os.kill(process, signal.SIGKILL)
        assert verdicts(judge) == [(None, Status.INFRA)] * 2, "no engine, no new container, no score"
        running.start()
        assert verdicts(judge) == scored
        judge.close()
        assert fork_servers() == []
