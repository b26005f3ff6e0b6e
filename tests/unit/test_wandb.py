"""The Weights & Biases sink, with the real library offline."""

import math
import time
from pathlib import Path

import pytest

from gppo_megatron.config.schema import Wandb
from gppo_megatron.observe.weights_and_biases import WeightsAndBiases


def written_record(folder: Path, until: bytes) -> bytes:
    """The offline run's file; wandb's own process may still be writing it after `finish` has returned."""
    deadline = time.monotonic() + 30
    (path,) = (folder / "wandb").rglob("*.wandb")
    while until not in (record := path.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return record


def test_metrics_are_logged_by_stage_with_their_own_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # it leaves folders there
    sink = WeightsAndBiases(Wandb("project", mode="offline"), tmp_path, {"seed": 1234567})
    sink.write(17, "warmup", {"policy/nll": 2.53125})
    sink.write(18, "train", {"rollout/reward": 0.21875, "kept/negative": math.nan})
    sink.close()
    record = written_record(tmp_path, until=b"0.21875")
    for written in (b"warmup/policy/nll", b"2.53125", b"train/rollout/reward", b"0.21875", b"train/step", b"1234567"):
        assert written in record, written
    assert b"kept/negative" not in record
    assert record.index(b"2.53125") < record.index(b"0.21875")
