"""Killed anywhere and resumed, a run is the one that was never interrupted."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gppo_megatron.errors import CheckpointError
from gppo_megatron.observe.sinks import is_timing
from gppo_megatron.run_folder import find_standing

pytestmark = pytest.mark.distributed

RUN = """\
run: {folder}
steps: 8
model: {{kind: tiny, hidden: 32, heads: 4, kv_heads: 2, ffn: 48, head_dim: 8}}
data:
  kind: reasoning_gym
  task: basic_arithmetic
  options: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, operators: ["+"], allow_parentheses: false}}
  prompt: "{{expression}}="
  remove: " "
  pool: 60
  holdout: 0.2
rollout: {{max_new_tokens: 3}}
batch: {{sequences: 32, group: 4, updates: 2, micro_batch_tokens: 100}}
warmup: {{steps: 30, sequences: 32, optimizer: {{lr: 1e-2, warmup_steps: 2, schedule: cosine}}}}
optimizer: {{lr: 2e-3, schedule: linear, warmup_steps: 2, weight_decay: 0.1}}
evaluation: {{every: 4, prompts: 8}}
save: {{checkpoint_every: 3, every: 4}}
"""
SCRIPT = Path(__file__).with_name("attempts.py")


def attempt(
    run: Path, *overrides: str, ranks: int = 1, kill: tuple[str, int] | None = None, by: int = signal.SIGKILL
) -> dict[str, Any]:
    """kill: a point of `attempts` and how often it is passed before the signal `by` comes."""
    arguments = [str(run), *overrides, "--resume"]
    prompts = str(run.with_suffix(".prompts"))
    return {"arguments": arguments, "ranks": ranks, "kill": kill and (*kill, by), "prompts": prompts}


def statuses(attempts: Sequence[dict[str, Any]], tmp_path: Path) -> tuple[list[int], str]:
    """The attempts' exit statuses, and what they wrote."""
    plan = tmp_path / "attempts.json"
    plan.write_text(json.dumps(attempts))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(plan)],
        capture_output=True, text=True, timeout=290, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def configured(folder: Path) -> Path:
    """The YAML of a run that writes `folder`."""
    run = folder.with_suffix(".yaml")
    run.write_text(RUN.format(folder=folder))
    return run


def measured(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics, times aside."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not is_timing(name)} for line in lines]


def prompts_of(folder: Path) -> list[str]:
    """The prompts of each step, in order; of a step that was done again, once."""
    return list(dict.fromkeys(folder.with_suffix(".prompts").read_text().splitlines()))


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended, said = statuses([attempt(configured(folder))], folder.parent)
    assert ended == [0], said
    return folder


def assert_same_run(folder: Path, whole: Path) -> None:
    """Bit for bit, in everything but times: metrics, data, weights, optimizer, schedule and random numbers."""
    assert measured(folder) == measured(whole)
    assert prompts_of(folder) == prompts_of(whole)
    one, other = newest(folder), newest(whole)
    files = sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    assert sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file()) == files
    weights = load_file(folder / "hf" / "model.safetensors"), load_file(whole / "hf" / "model.safetensors")
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    for file in files:
        if file.suffix == ".distcp" or file.name in ("common.pt",) or file.parts[0] == "random":
            assert (one / file).read_bytes() == (other / file).read_bytes(), file
    states = [json.loads((at / "train_state.json").read_text()) | {"metrics_bytes": 0} for at in (one, other)]
    assert states[0] == states[1]
    assert not list(folder.rglob("*.unfinished"))


def test_the_reference_run_learns_something(whole: Path) -> None:
    """Equality of runs in which nothing happens would show nothing."""
    trained = [line for line in measured(whole) if line["stage"] == "train" and line["step"]]
    assert sum(line["rollout/reward"] for line in trained) > 0.5
    assert sum(line["optimizer/grad_norm"] > 0 for line in trained) >= 4
    epochs = {json.loads(line)[0] for line in prompts_of(whole)}
    assert len(epochs) > 2


def test_a_run_killed_at_many_points_is_the_run_that_was_not(whole: Path, tmp_path: Path) -> None:
    run = configured(tmp_path / "run")
    dice = random.Random(20)
    asynchronous = "save.asynchronous=true"
    attempts = [
        attempt(run, kill=("warm-up", dice.randint(2, 9))),
        attempt(run, kill=("shards", dice.randint(1, 40))),
        attempt(run, asynchronous, kill=("shards", dice.randint(1, 20))),
        attempt(run, kill=("manifest", 2)),
        attempt(run, kill=("prune", dice.randint(1, 3))),
        attempt(run, kill=("epoch", dice.randint(4, 6))),
        attempt(run, kill=("update", 26)),
        attempt(run, asynchronous, kill=("rollout", 4)),
        attempt(run, asynchronous, kill=("rollout", 2), by=signal.SIGTERM),
        attempt(run, kill=("record", 2)),
        attempt(run, asynchronous, kill=("publish", 3)),
        attempt(run, asynchronous, kill=("shards", 15)),
        attempt(run, kill=("export", 1)),
        attempt(run, kill=("export", 2)),  # the trained model at the end
        attempt(run),
    ]
    ended, said = statuses(attempts, tmp_path)
    assert ended == [-9] * 8 + [143] + [-9] * 5 + [0], said
    assert_same_run(tmp_path / "run", whole)


def test_a_run_goes_on_in_another_layout(whole: Path, tmp_path: Path) -> None:
    """What was drawn from the same weights is the same; later steps differ by rounding, which sampling enlarges."""
    run = configured(tmp_path / "run")
    attempts = [
        attempt(run, kill=("update", 33)),
        attempt(run, "parallel.tensor=2", ranks=2),
    ]
    ended, said = statuses(attempts, tmp_path)
    assert ended == [-9, 0], said
    ours, theirs = measured(tmp_path / "run"), measured(whole)
    assert [(line["stage"], line["step"]) for line in ours] == [(line["stage"], line["step"]) for line in theirs]
    first = next(place for place, line in enumerate(ours) if line != theirs[place])
    for name in ("optimizer/grad_norm", "policy/entropy", "optimizer/lr", "loss/total"):
        assert ours[first][name] == pytest.approx(theirs[first][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("name", ["__0_0.distcp", "common.pt", ".metadata"])
def test_a_flipped_byte_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "hf")
    file = newest(folder) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=f"the content of {re.escape(name)} has changed"):
        find_standing(folder / "checkpoints")
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_is_evaluated_as_the_model_it_became(whole: Path, tmp_path: Path) -> None:
    tables = []
    for model in (whole / "hf", newest(whole)):
        out = tmp_path / model.name
        command = [sys.executable, "-m", "gppo_megatron", "eval", str(whole.with_suffix(".yaml")), "--samples", "2"]
        done = subprocess.run(
            [*command, "--model", str(model), "--out", str(out)],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
        tables.append([line for line in lines if "answers" in line])
    assert len(tables[0]) >= 5
    assert tables[0] == tables[1]
