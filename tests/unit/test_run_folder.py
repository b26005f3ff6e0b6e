"""A run's folder: made once, and gone again where the run ends before its first metrics."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gppo_megatron.checkpoint.folder import new_folder
from gppo_megatron.config.load import dump
from gppo_megatron.config.rollouts import EmbeddedRollout
from gppo_megatron.config.schema import ReasoningGymData, RunConfig, TinyModel
from gppo_megatron.errors import CheckpointError, ConfigError, DataError
from gppo_megatron.run_folder import CHECKPOINTS, CONFIG, METRICS, Standing, new_run_folder, reopened_run_folder
from gppo_megatron.train_state import TrainState


def config(folder: Path) -> RunConfig:
    return RunConfig(
        run=str(folder),
        steps=1,
        model=TinyModel(hidden=8, layers=1, heads=1, kv_heads=1, ffn=8),
        data=ReasoningGymData(task="chain_sum"),
        rollout=EmbeddedRollout(max_new_tokens=4),
    )


def fail(folder: Path, written: str | None) -> None:
    """A run that ends by an error, its metrics file as `written`."""
    with new_run_folder(config(folder), folder):
        assert (folder / "model" / "model.safetensors").exists()
        if written is not None:
            (folder / METRICS).write_text(written)
        raise DataError("typo")


@pytest.mark.parametrize("written", [None, ""])
def test_a_start_that_fails_leaves_its_place_free(written: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(DataError, match="typo"):
            fail(folder, written)
        assert not folder.exists()


@pytest.mark.parametrize("line", ["", "{}\n"])
def test_sigterm_removes_what_holds_no_metrics_and_then_does_what_it_did(line: str, tmp_path: Path) -> None:
    folder, received = tmp_path / "run", []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append((number, folder.exists())))
    try:
        with new_run_folder(config(folder), folder):
            (folder / METRICS).write_text(line)
            os.kill(os.getpid(), signal.SIGTERM)
            folder.mkdir(exist_ok=True)  # what follows happens only where the signal does not end the process
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [(signal.SIGTERM, line != "")]


def test_what_was_measured_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(DataError):
        fail(folder, "{}\n")
    assert (folder / METRICS).read_text() == "{}\n"


def test_a_folder_that_was_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("text")
    with pytest.raises(ConfigError, match="File exists"), new_run_folder(config(tmp_path), tmp_path):
        pass
    with pytest.raises(ConfigError, match="Not a directory"), new_run_folder(config(tmp_path), tmp_path / "kept/run"):
        pass
    assert (tmp_path / "kept").read_text() == "text"


STATE = TrainState("train", 4, 14, 1, metrics_bytes=6, rollouts={"epoch": 0, "offset": 3})


def interrupted(folder: Path, *states: TrainState) -> None:
    """A run's folder as a killed process leaves it, with a checkpoint of each state."""
    with new_run_folder(config(folder), folder):
        (folder / METRICS).write_text("line1\nline2\npart")
    for state in states:
        with new_folder(folder / CHECKPOINTS, f"step-{state.total}") as unfinished:
            state.write(unfinished)
            (unfinished / CONFIG).write_text(dump(config(folder)))
    for name in ("hf-step-4", "hf-step-5", "hf-step-12.unfinished"):
        (folder / name).mkdir()


def reopened(folder: Path, steps: int = 1, seed: int = 1) -> Standing | None:
    with reopened_run_folder(replace(config(folder), steps=steps, seed=seed), folder) as standing:
        return standing


def test_a_run_is_set_back_to_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, replace(STATE, step=2, total=12), STATE)
    assert reopened(folder) == Standing(folder / CHECKPOINTS / "step-14", STATE)
    assert (folder / METRICS).read_text() == "line1\n"
    assert sorted(path.name for path in folder.glob("hf*")) == ["hf-step-4"]


def test_without_a_checkpoint_a_run_begins_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder)
    assert reopened(folder) is None
    assert (folder / METRICS).read_text() == ""
    assert not list(folder.glob("hf*"))


def test_another_configuration_is_refused_and_a_longer_run_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, STATE)
    with pytest.raises(ConfigError, match="seed: cannot change when a run goes on: 1 when the checkpoint was saved"):
        reopened(folder, seed=2)
    assert (folder / METRICS).read_text().startswith("line1\nline2")  # nothing is cut before that is settled
    assert reopened(folder, steps=9) is not None
    assert "steps: 9" in (folder / CONFIG).read_text()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, STATE)
    file = folder / CHECKPOINTS / "step-14" / "train_state.json"
    content = bytearray(file.read_bytes())
    content[30] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="train_state.json"):
        reopened(folder)


def test_lines_of_metrics_that_are_missing_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, replace(STATE, metrics_bytes=1000))
    with pytest.raises(CheckpointError, match="has 16 bytes, but 1000"):
        reopened(folder)


def test_a_tracker_that_was_set_back_by_hand_asks_for_a_decision(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(folder, replace(STATE, total=12), STATE)
    (folder / CHECKPOINTS / "latest").write_text("step-12\n")
    with pytest.raises(CheckpointError, match="step-14 would be written again"):
        reopened(folder)


def test_a_folder_in_use_or_without_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gppo_megatron.run_folder.LOCK_SECONDS", 0.2)
    folder = tmp_path / "run"
    with new_run_folder(config(folder), folder):
        with pytest.raises(ConfigError, match="in use by a run that still works"):
            reopened(folder)
        (folder / METRICS).write_text("line\n")
    assert reopened(folder) is None
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="is no run's folder"):
        reopened(tmp_path / "other")
