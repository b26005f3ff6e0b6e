"""A run's folder: made once, and gone again where the run ends before its first metrics."""

import os
import signal
from pathlib import Path

import pytest

from gppo_megatron.build import METRICS, new_run_folder
from gppo_megatron.config.schema import EmbeddedRollout, ReasoningGymData, RunConfig, TinyModel
from gppo_megatron.errors import ConfigError, DataError


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
