"""The local launcher with small fake workers: why it stops, what it says, and that nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gppo_megatron.config.rollouts import EmbeddedRollout
from gppo_megatron.config.schema import Parallel, ReasoningGymData, RunConfig, TinyModel
from launchers.plan import plan_processes

REGISTER = "import os, sys, time, signal; open(f'{os.environ[\"PIDS\"]}/{os.getpid()}', 'w').close(); "
SLEEP = REGISTER + "time.sleep(60)"
ALL_THERE = """
while len(os.listdir(os.environ["PIDS"])) < int(os.environ["EXPECTED"]):
    time.sleep(0.02)
"""
FAIL = REGISTER + ALL_THERE + "print('the reason', file=sys.stderr); sys.exit(3)"
DRIVER = """
import json, sys
import launchers.local as local
from launchers.plan import ProcessPlan
local.STOP_SECONDS = 0.5
workers = json.loads(sys.argv[1])
plans = [ProcessPlan(rank, (sys.executable, "-S", "-c", code), {}) for rank, code in enumerate(workers)]
sys.exit(local.run_processes(plans, grace_seconds=float(sys.argv[2])))
"""


class Launch:
    """A launcher in a process of its own, and the ids of every worker that reported itself."""

    def __init__(self, folder: Path, *workers: str, expected: int | None = None, grace: float = 0.5) -> None:
        self.folder = folder
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(workers), str(grace)],
            env={**os.environ, "PIDS": str(folder), "EXPECTED": str(expected or len(workers))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self) -> list[int]:
        return [int(entry.name) for entry in self.folder.iterdir()]

    def wait_for_workers(self, count: int) -> None:
        eventually(lambda: len(self.pids()) == count)

    def finish(self) -> tuple[int, str, list[str]]:
        """Exit status, stdout and the lines of stderr; fails unless every worker is gone."""
        output, errors = self.process.communicate(timeout=60)
        eventually(lambda: not any(map(alive, self.pids())))
        return self.process.returncode, output, errors.splitlines()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_success_forwards_what_the_ranks_write(tmp_path: Path) -> None:
    first = "import sys; print('out 0'); print('err 0', file=sys.stderr)"
    second = "import sys; print('out 1', flush=True); print('err 1', file=sys.stderr); sys.stderr.write('no newline')"
    status, output, errors = Launch(tmp_path, first, second).finish()
    assert status == 0
    assert output == "out 0\n"
    assert sorted(errors) == ["err 0", "rank 1: err 1", "rank 1: no newline", "rank 1: out 1"]


def test_a_long_output_arrives_whole(tmp_path: Path) -> None:
    worker = "import sys; [print('x' * 99, i, file=sys.stderr) for i in range(3000)]"
    _, _, errors = Launch(tmp_path, "", worker).finish()
    assert errors == [f"rank 1: {'x' * 99} {number}" for number in range(3000)]


def test_a_failed_rank_stops_the_others_and_is_named_last(tmp_path: Path) -> None:
    launch = Launch(tmp_path, SLEEP, FAIL, SLEEP)
    status, _, errors = launch.finish()
    assert status == 3
    assert errors == ["rank 1: the reason", "rank 1 exited with status 3; stopped the other 2 processes"]
    assert len(launch.pids()) == 3
    assert time.monotonic() - launch.started < 40


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    killed = REGISTER + ALL_THERE + "os.kill(os.getpid(), signal.SIGKILL)"
    status, _, errors = Launch(tmp_path, SLEEP, killed).finish()
    assert status == 128 + 9
    assert errors == ["rank 1 was killed by signal SIGKILL; stopped the other 1 process"]


def test_a_single_process_has_no_others(tmp_path: Path) -> None:
    assert Launch(tmp_path, "raise SystemExit(2)").finish() == (2, "", ["rank 0 exited with status 2"])


def test_a_lost_peer_is_not_the_cause_when_another_rank_failed(tmp_path: Path) -> None:
    lost = REGISTER + "time.sleep(0.2); sys.exit(75)"
    late = REGISTER + "time.sleep(0.8); sys.exit(4)"
    status, _, errors = Launch(tmp_path, lost, late, SLEEP).finish()
    assert status == 4
    assert errors == ["rank 1 exited with status 4; stopped the other 1 process"]


def test_a_lost_peer_is_the_cause_when_nothing_else_failed(tmp_path: Path) -> None:
    status, _, errors = Launch(tmp_path, SLEEP, REGISTER + "sys.exit(75)").finish()
    assert status == 75
    assert errors == ["rank 1 exited with status 75; stopped the other 1 process"]


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
    status, _, errors = Launch(tmp_path, stubborn, FAIL).finish()
    assert status == 3
    assert errors[-1] == "rank 1 exited with status 3; stopped the other 1 process"


def test_children_of_a_rank_go_with_it(tmp_path: Path) -> None:
    spawn = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}]); "
    launch = Launch(tmp_path, spawn + SLEEP, spawn + FAIL, expected=4)
    status, _, _ = launch.finish()
    assert status == 3
    assert len(launch.pids()) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_stops_all(tmp_path: Path, number: signal.Signals) -> None:
    launch = Launch(tmp_path, SLEEP, SLEEP)
    launch.wait_for_workers(2)
    launch.process.send_signal(number)
    assert launch.finish() == (128 + number, "", ["interrupted; stopped 2 processes"])


SAVES = (
    """
import signal, sys, time
def save(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
"""
    + SLEEP
)


def test_processes_have_the_grace_to_save_their_state(tmp_path: Path) -> None:
    launch = Launch(tmp_path, SAVES, grace=30)
    launch.wait_for_workers(1)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.finish() == (143, "saved\n", ["interrupted; stopped 1 process"])
    assert time.monotonic() - launch.started < 30


def test_a_second_signal_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
    launch = Launch(tmp_path, stubborn, grace=60)
    launch.wait_for_workers(1)
    for _ in range(2):
        launch.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert launch.finish() == (130, "", ["interrupted; stopped 1 process"])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_processes_die_with_a_killed_launcher(tmp_path: Path) -> None:
    launch = Launch(tmp_path, SLEEP, SLEEP)
    launch.wait_for_workers(2)
    launch.process.kill()
    assert launch.finish()[0] == -signal.SIGKILL


def test_the_plan_gives_each_process_its_place() -> None:
    config = RunConfig(
        run="runs/x",
        steps=1,
        model=TinyModel(),
        data=ReasoningGymData(task="chain_sum"),
        rollout=EmbeddedRollout(max_new_tokens=8),
        parallel=Parallel(tensor=2, data=2),
    )
    plans = plan_processes(config, "run.yaml", ["steps=1"], port=29_501)
    assert [plan.rank for plan in plans] == [0, 1, 2, 3]
    assert {plan.argv for plan in plans} == {
        (sys.executable, "-m", "gppo_megatron", "train", "run.yaml", "steps=1"),
    }
    assert plans[2].environment == {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29501",
        "OMP_NUM_THREADS": "1",
        "GPPO_LAUNCHED": "1",
    }
