"""A whole run that samples ahead of its training: killed with a full buffer, resumed in another layout."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_servers import model, recipe, wait_for_steps
from tests.served import serving_process

__all__ = ["model"]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

AHEAD = (
    "parallel.tensor=1", "prefetch.max_lag=1", "filtering.filters=[{kind: no_signal}]", "filtering.extra_prompts=200",
    "save.checkpoint_every=1", "evaluation.every=500",
)  # fmt: skip
BOUND = 2  # optimizer steps: max_lag 1 x batch.updates 2


def books(folder: Path) -> Mapping[str, Any]:
    """What the newest checkpoint says of the prompts."""
    newest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    state: Mapping[str, Any] = json.loads((newest / "train_state.json").read_text())["rollouts"]
    return state


def test_a_killed_run_goes_on_with_its_buffer_in_another_layout(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    with serving_process(model) as server:
        file = recipe(tmp_path, model, (server.url,), "disk", "steps=500", *AHEAD)
        command = [sys.executable, "-m", "gppo_megatron", "train", str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            wait_for_steps(run / "metrics.jsonl", 4, process)
            process.kill()
        left = books(run)
        assert left["ready"] or left["flying"], "killed with an empty buffer"
        done = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        again = [sys.executable, "-m", "gppo_megatron", "launch", str(file), "--resume"]
        again += [f"steps={done + 3}", "parallel.data=2"]
        resumed = subprocess.run(again, capture_output=True, text=True, timeout=500, check=False)
        assert resumed.returncode == 0, resumed.stderr

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "train" and line["step"] > 0]
    assert [line["step"] for line in steps] == list(range(1, done + 4))
    counted: Counter[str] = Counter()
    for line in steps:
        counted.update({name: int(value) for name, value in line.items() if name[:8] == "prompts/" and value})
        assert line["prompts/trained"] + line["prompts/empty_places"] == 8
        assert (line["prompts/staleness_max"] or 0) <= BOUND
        assert line["rollout/garbled_replies"] == 0
        assert (line["policy/sampler_gap_max"] or 0) < 1e-5
    assert max(line["prompts/staleness_max"] or 0 for line in steps) > 0, "nothing was sampled ahead"
    ended = books(run)
    assert not ended["ready"]
    assert not ended["flying"], "nothing is sampled for steps that never come"
    filtered, dropped = sum(ended["filtered"].values()), sum(ended["dropped"].values())
    assert ended["dispatched"] == ended["trained"] + filtered + dropped
    assert ended["dispatched"] == counted["prompts/dispatched"]
    assert ended["trained"] == counted["prompts/trained"]
    assert filtered == counted["prompts/filtered_no_signal"]
    assert "Traceback" not in resumed.stderr
