"""A run's folder: made once, gone again where the start fails, and taken up again by the same run."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from gppo_megatron.checkpoint.folder import latest, published, try_lock
from gppo_megatron.checkpoint.manifest import verify
from gppo_megatron.config.changes import check_changes
from gppo_megatron.config.load import dump, load
from gppo_megatron.config.model_folder import MODEL
from gppo_megatron.config.schema import RunConfig, TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import CheckpointError, ConfigError
from gppo_megatron.observe.jsonl import cut
from gppo_megatron.train_state import TrainState, read_train_state

METRICS, CONFIG, VERSIONS = "metrics.jsonl", "config.yaml", "versions.json"
CHECKPOINTS, TRAINED = "checkpoints", "hf"
LOCK_SECONDS = 20.0
"""How long what a killed process had forked may still hold the folder."""
NUMERICS = ("gppo-megatron", "torch", "megatron-core", "transformers", "math-verify", "sympy", "reasoning-gym")


@dataclass(frozen=True)
class Standing:
    """Where an earlier process left the run: its newest checkpoint, verified, and the state in it."""

    checkpoint: Path
    state: TrainState

    def __str__(self) -> str:
        return f"after step {self.state.step} of {self.state.stage}, from {self.checkpoint}"


@contextmanager
def new_run_folder(config: RunConfig, folder: Path) -> Iterator[None]:
    """The run's folder, which disappears again where the run ends, by an error or SIGTERM, before its first metrics.

    Until then it holds nothing worth keeping, and the repaired command must find its place free.
    Raises ConfigError where the folder cannot be made. Must be entered in the main thread.
    """
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"run folder {folder} cannot be made: {error.strerror}; choose another `run:`") from error

    def stop(number: int, frame: object) -> None:
        remove_unmeasured(folder)
        signal.signal(number, previous)
        os.kill(os.getpid(), number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        with _alone_in(folder):
            fill_run_folder(config, folder)
            yield
    finally:
        remove_unmeasured(folder)
        signal.signal(signal.SIGTERM, previous)


def remove_unmeasured(folder: Path) -> None:
    """Remove a run folder without a line of metrics."""
    metrics = folder / METRICS
    if not metrics.exists() or metrics.stat().st_size == 0:
        shutil.rmtree(folder)


def fill_run_folder(config: RunConfig, folder: Path) -> None:
    """The resolved configuration, the packages' versions, and the model when it is to be made."""
    (folder / CONFIG).write_text(dump(config), encoding="utf-8")
    (folder / VERSIONS).write_text(json.dumps(versions(), indent=1), encoding="utf-8")
    if isinstance(config.model, TinyModel) and not (folder / MODEL).exists():
        unfinished = folder / f"{MODEL}.unfinished"
        create_tiny(config.model, unfinished, config.seed)
        unfinished.rename(folder / MODEL)  # those who wait for it find it whole


def versions() -> dict[str, str]:
    """The packages that a run's numbers depend on, verifiers included."""
    return {package: metadata.version(package) for package in NUMERICS}


@contextmanager
def reopened_run_folder(config: RunConfig, folder: Path) -> Iterator[Standing | None]:
    """The folder of a run that an earlier process began, set back to its newest checkpoint; None: to its beginning.

    Lines of metrics and Hugging Face folders of later steps are removed: the run will write them again.
    Raises ConfigError where the folder is no run's, is in use, or the configuration is not that run's any more;
    CheckpointError where the checkpoint is damaged.
    """
    saved = folder / CONFIG
    if not saved.is_file():
        raise ConfigError(f"{folder} is no run's folder: it has no {CONFIG}; choose another `run:` or remove it")
    with _alone_in(folder):
        standing = find_standing(folder / CHECKPOINTS)
        check_changes(load(standing.checkpoint / CONFIG if standing else saved), config, source=f"{folder} --resume")
        _set_back(folder, standing)
        fill_run_folder(config, folder)
        yield standing


def find_standing(root: Path) -> Standing | None:
    """The newest checkpoint below `root`, every byte of it compared with its manifest; None where there is none yet."""
    checkpoint = latest(root) if root.is_dir() else None
    if checkpoint is None:
        return None
    later = [folder.name for folder in published(root)]
    later = later[later.index(checkpoint.name) + 1 :]
    if later:
        raise CheckpointError(
            f"{root / 'latest'} names {checkpoint.name}, but {', '.join(later)} would be written again; "
            "move it away, or name it there"
        )
    verify(checkpoint)
    return Standing(checkpoint, read_train_state(checkpoint))


def _set_back(folder: Path, standing: Standing | None) -> None:
    cut(folder / METRICS, standing.state.metrics_bytes if standing else 0)
    done = standing.state.step if standing and standing.state.stage == "train" else 0
    for path in folder.glob("hf*"):
        step = re.fullmatch(r"hf-step-(\d+)", path.name)
        if path.name.endswith(".unfinished") or (step and int(step.group(1)) > done):
            shutil.rmtree(path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the run's folder: two processes that write the same run would mix it up."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise ConfigError(f"{folder} is in use by a run that still works; stop that one first")
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)
