"""Two processes that meet trouble: one that is stopped is named, and torchrun brings a run through a crash."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.distributed.test_resume import attempt, configured, measured, newest, statuses

pytestmark = pytest.mark.distributed


def eventually(condition: Callable[[], object], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not become true in time"
        time.sleep(0.05)


@contextmanager
def running(*module: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m module ...`; where the test fails, it and all it started are killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.communicate()


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_of(parent: int, rank: int) -> psutil.Process:
    """The process of that rank below `parent`."""
    for process in psutil.Process(parent).children(recursive=True):
        if "train" in process.cmdline() and process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError(f"no process of rank {rank}")


def metrics_hold(folder: Path, text: str) -> bool:
    file = folder / "metrics.jsonl"
    return file.exists() and text in file.read_text()


def test_a_stopped_rank_is_named_within_its_deadline(tmp_path: Path) -> None:
    folder, silence = tmp_path / "run", 8
    run = configured(folder)
    with running(
        "gppo_megatron", "launch", str(run), "steps=100000", "parallel.data=2",
        "save.checkpoint_every=0", "save.every=0", f"watchdog.silence={silence}",
    ) as launcher:  # fmt: skip
        eventually(lambda: metrics_hold(folder, '"train"'))
        processes = psutil.Process(launcher.pid).children(recursive=True)
        victim = rank_of(launcher.pid, 1)
        stopped = time.monotonic()
        victim.send_signal(signal.SIGSTOP)
        _, said = launcher.communicate(timeout=60)
    assert time.monotonic() - stopped < silence + 30
    named = f"rank 1 (pid {victim.pid} on {socket.gethostname()}) has given no sign of life for watchdog.silence = 8 s"
    assert f"watchdog of rank 0: {named}; it was last seen in " in said
    assert re.search(r"rank 0 was in train \d+: \w+; its threads:\n", said)
    assert "most recent call first" in said
    assert said.splitlines()[-1] == "rank 0 exited with status 76; stopped the other 1 process"
    assert launcher.returncode == 76
    assert not psutil.wait_procs(processes, timeout=30)[1]


def test_torchrun_brings_a_run_through_a_crash(tmp_path: Path) -> None:
    """Restarted after a rank was killed, it gives the metrics of the run that nothing interrupted."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    ended, said = statuses([attempt(configured(whole), "parallel.tensor=2", ranks=2)], tmp_path)
    assert ended == [0], said
    with running(
        "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1",
        "-m", "gppo_megatron", "train", str(configured(folder)), "parallel.tensor=2", "--resume",
    ) as agent:  # fmt: skip
        eventually(lambda: metrics_hold(folder, '"train"'))
        rank_of(agent.pid, 1).kill()
        _, said = agent.communicate(timeout=250)
    assert agent.returncode == 0, said
    assert measured(folder) == measured(whole)
    assert newest(folder).name == newest(whole).name
