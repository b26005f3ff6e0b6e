"""Runs that start their own rollout servers: one that is killed comes back, and none is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from gppo_megatron.config.load import dump, load
from gppo_megatron.config.rollouts import SglangRollout
from gppo_megatron.config.started import ADDRESS, StartEmbedded, StartSglang
from tests.e2e.test_servers import SHORT, launch
from tests.served import CONTEXT

pytestmark = pytest.mark.distributed

DEADLINE = 280.0


def ports(count: int) -> int:
    """The first of so many ports that were free a moment ago, one after another."""
    while True:
        with socket.socket() as first:
            first.bind((ADDRESS, 0))
            port = int(first.getsockname()[1])
        try:
            for number in range(port, port + count):
                with socket.socket() as probe:
                    probe.bind((ADDRESS, number))
        except (OSError, OverflowError):
            continue
        return port


def recipe(folder: Path, start: StartEmbedded | StartSglang, *overrides: str) -> Path:
    """The demo's recipe, model included, over servers that it starts."""
    config = load(
        "launchers/recipes/demo.yaml", [*SHORT, "warmup.steps=5", "warmup.optimizer.warmup_steps=1", *overrides]
    )
    rollout = SglangRollout(
        max_new_tokens=config.rollout.max_new_tokens,
        start=start,
        context=CONTEXT,
        sync="disk",
        stall_seconds=60.0,
        recovery_seconds=600.0,
    )
    file = folder / "run.yaml"
    file.write_text(dump(replace(config, run=str(folder / "run"), rollout=rollout)), encoding="utf-8")
    return file


def processes_of(folder: Path) -> list[psutil.Process]:
    """Of a run below `folder`: launcher, ranks and servers name it in their commands."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def server_at(folder: Path, url: str) -> psutil.Process | None:
    port = url.rpartition(":")[2]
    served = [process for process in processes_of(folder) if process.cmdline()[-1:] and port in process.cmdline()]
    return served[0] if served else None


def weights_at(url: str) -> str:
    try:
        return str(httpx.get(f"{url}/model_info", timeout=10).json()["weight_version"])
    except httpx.HTTPError:
        return ""


def steps_of(folder: Path) -> list[dict[str, float]]:
    metrics = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [line for line in lines if line["stage"] == "train" and line["step"] > 0]


def wait(process: "subprocess.Popen[str]", condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.2)


def ended(process: "subprocess.Popen[str]", folder: Path) -> tuple[int, str]:
    """Its status and its errors, once it is over and no process of its run is left."""
    _, errors = process.communicate(timeout=DEADLINE)
    deadline = time.monotonic() + 30
    while left := processes_of(folder):
        assert time.monotonic() < deadline, [each.cmdline() for each in left]
        time.sleep(0.1)
    assert "Traceback" not in errors
    return process.returncode, errors


@pytest.mark.timeout(900)
def test_a_server_that_is_killed_comes_back_with_the_right_weights(tmp_path: Path) -> None:
    start = StartEmbedded(count=2, port=ports(2))
    file = recipe(tmp_path, start, "steps=400", "evaluation.every=400")
    process = launch(file)
    wait(process, lambda: len(steps_of(tmp_path)) >= 2)
    killed = server_at(tmp_path, start.urls[0])
    assert killed is not None
    killed.kill()
    killed.wait(DEADLINE)
    wait(process, lambda: weights_at(start.urls[0]).startswith("run-"))
    back = len(steps_of(tmp_path))
    wait(process, lambda: len(steps_of(tmp_path)) >= back + 2)
    process.send_signal(signal.SIGTERM)
    status, errors = ended(process, tmp_path)
    assert status == 128 + signal.SIGTERM, errors
    said = f"rollout server {start.urls[0]} was killed by signal SIGKILL; started again (1 of 3 times in 1800 s)"
    assert said in errors.splitlines()
    steps = steps_of(tmp_path)
    assert all(line["rollout/garbled_replies"] == 0 for line in steps)
    assert all(0 < line["policy/sampler_gap_max"] < 1e-4 for line in steps)

    last = int(steps[-1]["step"])
    command = [sys.executable, "-m", "gppo_megatron", "launch", str(file), "--resume", f"steps={last + 2}"]
    resumed = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    status, errors = ended(resumed, tmp_path)
    assert status == 0, errors
    assert int(steps_of(tmp_path)[-1]["step"]) == last + 2
    for port in start.ports:
        assert (tmp_path / "run" / "servers" / f"{port}.log").read_text().count("serving ") >= 2


def rank_0(folder: Path) -> psutil.Process:
    (found,) = [process for process in processes_of(folder) if process.environ().get("RANK") == "0"]
    return found


ENDINGS: dict[str, tuple[Callable[["subprocess.Popen[str]", Path], object], int]] = {
    "Ctrl-C": (lambda process, folder: process.send_signal(signal.SIGINT), 128 + signal.SIGINT),
    "a rank is killed": (lambda process, folder: rank_0(folder).kill(), 128 + signal.SIGKILL),
    "the launcher is killed": (lambda process, folder: process.kill(), -signal.SIGKILL),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ending", list(ENDINGS))
def test_no_server_is_left_however_the_run_ends(tmp_path: Path, ending: str) -> None:
    act, status = ENDINGS[ending]
    start = StartEmbedded(port=ports(1))
    process = launch(recipe(tmp_path, start, "steps=400", "evaluation.every=400"))
    wait(process, lambda: len(steps_of(tmp_path)) >= 1)
    assert server_at(tmp_path, start.urls[0]) is not None
    act(process, tmp_path)
    assert ended(process, tmp_path)[0] == status


def test_a_server_that_cannot_start_ends_the_run_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    start = StartEmbedded(port=ports(1), restarts=1, arguments=("--fault=nonsense",))
    status, errors = ended(launch(recipe(tmp_path, start)), tmp_path)
    assert status == 1, errors
    url = start.urls[0]
    assert f"rollout server {url} exited with status 2; started again (1 of 1 times in 1800 s)" in errors
    assert f"rollout server {url} exited with status 2, for the 2. time in 1800 s; its log " in errors
    assert "--fault: must be KIND[@update]" in errors.splitlines()[-1]


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server((ADDRESS, 0)) as taken:
        port = taken.getsockname()[1]
        status, errors = ended(launch(recipe(tmp_path, StartEmbedded(port=port))), tmp_path)
    assert (status, len(errors.splitlines())) == (2, 1)
    assert f"rollout.start.port: {ADDRESS}:{port} cannot be served at: Address already in use; choose" in errors
    assert not os.path.exists(tmp_path / "run")


@pytest.mark.timeout(600)
def test_training_replays_the_experts_that_servers_report(tmp_path: Path) -> None:
    overrides = ("steps=2", "parallel.tensor=1", "model.experts=4", "objective.routing=replayed")
    status, errors = ended(launch(recipe(tmp_path, StartEmbedded(port=ports(1)), *overrides)), tmp_path)
    assert status == 0, errors
    steps = steps_of(tmp_path)
    assert len(steps) == 2
    assert all(0 < line["policy/sampler_gap_max"] < 1e-4 for line in steps)
