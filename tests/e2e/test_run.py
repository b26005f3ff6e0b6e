"""Whole runs on two processes: what they write, that they repeat, that layouts agree, and how they end."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
import transformers

from gppo_megatron.checkpoint.manifest import verify
from gppo_megatron.observe.sinks import is_timing

pytestmark = pytest.mark.distributed

RECIPE = Path("launchers/recipes/demo.yaml")
SHORT = (
    "model.hidden=64", "model.heads=4", "model.kv_heads=2", "warmup.steps=30", "warmup.optimizer.warmup_steps=5",
    "steps=4", "optimizer.schedule=constant", "batch.sequences=64", "batch.updates=2",
    "evaluation.every=2", "evaluation.prompts=20",
)  # fmt: skip
Values = dict[str, float | str | None]


def command(folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "gppo_megatron", "launch", str(RECIPE), f"run={folder}", *SHORT, *overrides]


def run(folder: Path, *overrides: str) -> list[Values]:
    """Launch a short run to its end; its metrics, times aside."""
    result = subprocess.run(command(folder, *overrides), capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not is_timing(name)} for line in lines]


def trained(lines: Sequence[Values]) -> list[Values]:
    return [line for line in lines if line["stage"] == "train" and line["step"] != 0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Values]]:
    """The run folder and metrics of one short run with tensor parallelism 2."""
    folder = tmp_path_factory.mktemp("run") / "first"
    return folder, run(folder)


def test_a_run_leaves_everything_it_promises(finished: tuple[Path, list[Values]]) -> None:
    folder, lines = finished
    assert [(line["stage"], line["step"]) for line in lines] == [
        *(("warmup", step) for step in range(1, 31)),
        *(("train", step) for step in range(5)),
    ]
    evaluated = [line["step"] for line in lines if "evaluation/accuracy" in line]
    assert evaluated == [0, 2, 4]
    assert lines[29]["policy/nll"] < 0.6 * lines[0]["policy/nll"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "</html>" in (folder / "report.html").read_text()
    assert list((folder / "tensorboard").glob("events.*"))
    assert json.loads((folder / "versions.json").read_text())["math-verify"] == "0.9.0"
    again = folder / "config.yaml"
    shown = subprocess.run(
        [sys.executable, "-m", "gppo_megatron", "train", str(again), "--print"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert again.read_text().strip() in shown.stdout


def test_the_sampler_holds_the_policys_weights_after_every_sync(finished: tuple[Path, list[Values]]) -> None:
    gaps = [line["policy/sampler_gap_max"] for line in trained(finished[1])]
    assert len(gaps) == 4
    assert all(0 < gap <= 1e-5 for gap in gaps), gaps
    assert all(line["policy/age"] == pytest.approx(0.5, abs=0.05) for line in trained(finished[1]))


def test_the_trained_model_is_an_ordinary_hugging_face_model(finished: tuple[Path, list[Values]]) -> None:
    folder = finished[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    start = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert all(moved)
    ids = torch.tensor([tokenizer.encode("7+2+9=", add_special_tokens=False)])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True).strip("<end>").isdigit()


def test_the_same_seed_gives_the_same_metrics(finished: tuple[Path, list[Values]], tmp_path: Path) -> None:
    assert run(tmp_path / "second") == finished[1]
    assert run(tmp_path / "third", "seed=2", "steps=1")[:3] != finished[1][:3]


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_every_layout_trains_alike(
    layout: tuple[int, int, int], finished: tuple[Path, list[Values]], tmp_path: Path
) -> None:
    """The first step's samples, rewards and both optimizer steps agree; later steps drift by rounding alone."""
    overrides = [f"parallel.{name}={size}" for name, size in zip(("tensor", "pipeline", "data"), layout, strict=True)]
    lines = trained(run(tmp_path / "run", *overrides, "steps=1", "batch.micro_batch_tokens=128"))
    expected = trained(finished[1])[0]
    for name in ("rollout/reward", "rollout/length", "kept/negative", "optimizer/grad_norm", "policy/entropy"):
        assert lines[0][name] == pytest.approx(expected[name], rel=2e-3), name
    assert lines[0]["rollout/sampled_tokens"] == expected["rollout/sampled_tokens"]


def test_experts_train_where_the_sampler_sent_the_tokens(tmp_path: Path) -> None:
    """Experts on two processes, layers recomputed, the anchor scored by replay too."""
    lines = trained(
        run(
            tmp_path / "run", "steps=2", "model.experts=4", "model.expert_ffn=48", "parallel.tensor=1",
            "parallel.data=2", "parallel.expert=2", "memory.recompute=full", "objective.routing=replayed",
            "objective.anchor=recomputed", "batch.micro_batch_tokens=128",
        )
    )  # fmt: skip
    assert len(lines) == 2
    assert all(0 < line["policy/sampler_gap_max"] <= 1e-5 for line in lines)


def test_a_recomputed_anchor_equals_the_samplers_before_the_first_update(
    finished: tuple[Path, list[Values]], tmp_path: Path
) -> None:
    lines = trained(run(tmp_path / "run", "objective.anchor=recomputed", "steps=1"))
    for name in ("ratio/mean", "divergence/mean", "optimizer/grad_norm"):
        assert lines[0][name] == pytest.approx(trained(finished[1])[0][name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("estimator", ["exact", "topk"])
def test_a_run_whose_divergence_comes_from_the_head(estimator: str, tmp_path: Path) -> None:
    """The ladder holds in the metrics, and decisions are compared: on all tokens, or on a sample of them."""
    sample = ["objective.topk=4", "diagnostics.exact_sample=1000"] if estimator == "topk" else []
    preset = [f"objective.preset=gppo_{estimator}", "optimizer.lr=0.003", "steps=3"]
    lines = trained(run(tmp_path / "run", *preset, *sample, "evaluation.every=3", "evaluation.prompts=4"))
    assert len(lines) == 3
    for line in lines:
        assert 0 <= line["rollout/reward"] <= 1
        assert all(math.isfinite(line[name]) for name in ("loss/total", "optimizer/grad_norm", "kept/positive"))
        assert line["divergence/mean"] == pytest.approx(line[f"estimate/{estimator}"], rel=1e-4)
        ladder = [line[f"estimate/{name}"] for name in ("atomic", "binary", estimator, "exact")]
        assert 1e-5 < ladder[0] < ladder[1] <= ladder[2] * (1 + 1e-6)
        assert ladder[2] <= ladder[3] * (1 + 1e-6)
        assert 0 <= line["decision/differs_binary"] <= line["decision/differs_atomic"] < 0.5
        assert 0 < line["policy/collision"] < 1
    assert max(line["decision/differs_atomic"] for line in lines) > 0


def started(folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A long run that has taken its first steps, and its processes, verifiers included."""
    launcher = subprocess.Popen(
        command(folder, "steps=100000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return launcher, psutil.Process(launcher.pid).children(recursive=True)


def ended(launcher: subprocess.Popen[str], processes: Sequence[psutil.Process], seconds: float = 15) -> list[str]:
    """What the launcher said on stderr; fails unless all is over within so many seconds."""
    _, errors = launcher.communicate(timeout=seconds)
    _, alive = psutil.wait_procs(processes, timeout=3)
    assert not alive
    return errors.splitlines()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_with_one_line(rank: int, tmp_path: Path) -> None:
    launcher, processes = started(tmp_path / "run")
    ranks = [process for process in processes if "train" in process.cmdline()]
    victim = next(process for process in ranks if process.environ()["RANK"] == str(rank))
    victim.send_signal(signal.SIGKILL)
    assert ended(launcher, processes) == [f"rank {rank} was killed by signal SIGKILL; stopped the other 1 process"]
    assert launcher.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_a_checkpoint_and_ends_the_run(number: int, tmp_path: Path) -> None:
    launcher, processes = started(tmp_path / "run")
    os.kill(launcher.pid, number)
    said, last = ended(launcher, processes, seconds=65)  # save.grace, and a little
    assert re.fullmatch(r"SIGTERM: stopped after step \d+ of train; `--resume` goes on from there", said)
    assert last == "interrupted; stopped 2 processes"
    assert launcher.returncode == 128 + number
    step = int(said.split()[4])
    verify(tmp_path / "run" / "checkpoints" / f"step-{30 + step}")
