"""Whole runs that sample from servers of other processes, two trainer processes against two servers."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gppo_megatron.config.load import dump, load
from gppo_megatron.config.rollouts import SglangRollout
from gppo_megatron.config.schema import HfModel, TinyModel
from gppo_megatron.data.model_folder import create_tiny
from tests.served import CONTEXT, serving_process

pytestmark = pytest.mark.distributed

SHORT = (
    "model.hidden=64", "model.heads=4", "model.kv_heads=2", "warmup.steps=30", "warmup.optimizer.warmup_steps=5",
    "steps=4", "optimizer.schedule=constant", "batch.sequences=64", "batch.updates=2",
    "evaluation.every=2", "evaluation.prompts=20", "batch.micro_batch_tokens=1024",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = load("launchers/recipes/demo.yaml", SHORT)
    assert isinstance(config.model, TinyModel)
    create_tiny(config.model, folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[tuple[str, str]]:
    with serving_process(model) as one, serving_process(model) as two:
        yield one.url, two.url


def recipe(folder: Path, model: Path, urls: tuple[str, ...], sync: str, *overrides: str) -> Path:
    """The demo's recipe over servers, as a file."""
    config = load("launchers/recipes/demo.yaml", [*SHORT, *overrides])
    rollout = SglangRollout(
        max_new_tokens=config.rollout.max_new_tokens,
        urls=urls,
        context=CONTEXT,
        sync=sync,  # type: ignore[arg-type]
        recovery_seconds=1.0,
        stall_seconds=60.0,
    )
    config = replace(config, run=str(folder / "run"), model=HfModel(str(model)), rollout=rollout)
    file = folder / "run.yaml"
    file.write_text(dump(config), encoding="utf-8")
    return file


def launch(file: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "gppo_megatron", "launch", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("sync", ["distributed", "tensor", "disk"])
def test_servers_hold_the_policys_weights_after_every_sync(
    tmp_path: Path, model: Path, servers: tuple[str, str], sync: str
) -> None:
    process = launch(recipe(tmp_path, model, servers, sync))
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "train" and line["step"] > 0]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        assert 0 < line["policy/sampler_gap_max"] < 1e-5
        assert (line["rollout/retries"], line["rollout/servers_lost"], line["rollout/garbled_replies"]) == (0, 0, 0)


def test_a_run_goes_on_without_a_server_that_is_killed_and_ends_with_one_line_without_any(
    tmp_path: Path, model: Path
) -> None:
    with serving_process(model) as one, serving_process(model) as two:
        file = recipe(tmp_path, model, (one.url, two.url), "disk", "steps=400", "evaluation.every=400")
        process = launch(file)
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for_steps(metrics, 2, process)
        one.process.kill()
        before = steps_of(metrics)
        wait_for_steps(metrics, before + 3, process)
        two.process.kill()
        _, errors = process.communicate(timeout=200)
    assert process.returncode not in (0, None)
    said = [line for line in errors.splitlines() if line.startswith(("no rollout server", "no server holds"))]
    assert len(said) == 1, errors
    assert one.url in said[0]
    assert two.url in said[0]
    assert "Traceback" not in errors
    lost = [json.loads(line).get("rollout/servers_lost", 0) for line in metrics.read_text().splitlines()]
    assert sum(lost) >= 1


def steps_of(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return sum(json.loads(line)["stage"] == "train" for line in lines)


def wait_for_steps(metrics: Path, steps: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 280
    while steps_of(metrics) < steps:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_running_server_is_evaluated_and_its_answers_are_never_mixed_with_another_ones(
    tmp_path: Path, model: Path, servers: tuple[str, str]
) -> None:
    file = recipe(tmp_path, model, servers, "disk")
    command = [sys.executable, "-m", "gppo_megatron", "eval", str(file), "--model", str(model), "--problems", "6"]
    command += ["--samples", "2", "--server", servers[0]]

    def evaluate() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    first = evaluate()
    assert first.returncode == 0, first.stderr
    assert "6 problems x 2 answers" in first.stdout
    answers = (tmp_path / "run" / "eval" / "answers.jsonl").read_text()
    assert len(answers.splitlines()) == 6
    again = evaluate()
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "run" / "eval" / "answers.jsonl").read_text() == answers
    assert [line for line in first.stdout.splitlines() if "avg@" in line] == [
        line for line in again.stdout.splitlines() if "avg@" in line
    ]
    assert httpx.post(f"{servers[0]}/update_weight_version", json={"new_version": "other"}).is_success
    other = evaluate()
    assert other.returncode != 0
    assert "Traceback" not in other.stderr
