"""Checkpoints of a run, from which it goes on: written beside the training, published whole, the newest few kept."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from gppo_megatron.checkpoint.folder import UNFINISHED, new_folder
from gppo_megatron.config.schema import Save
from gppo_megatron.errors import Interrupted
from gppo_megatron.metrics import Max, StepMetrics
from gppo_megatron.policy.megatron.hf_folder import SIDE_FILES
from gppo_megatron.policy.megatron.shards import ShardedState, complete, read_shards, write_shards
from gppo_megatron.policy.megatron.stored_weights import SIDE
from gppo_megatron.train_state import Resumable, TrainState, restore_random_state, write_random_state
from gppo_megatron.types import Team

CONFIG = "config.yaml"


class Policy(Protocol):
    """What of a policy a checkpoint needs."""

    def state(self, loading: bool = False) -> ShardedState: ...
    def restore(self, read: ShardedState) -> None: ...


class Checkpoints:
    """The checkpoints of one run, `root/step-N` with N = `TrainState.total`, one being written at a time.

    save: how many stay; with `asynchronous`, forked processes write the shards and a thread the manifest, while
    training goes on. config: the resolved configuration as YAML. model_folder: whose side files (the model's
    config.json, its tokenizer) are kept with the shards.
    """

    def __init__(self, root: Path, world: Team, save: Save, config: str, model_folder: Path) -> None:
        self._root, self._world, self._save = root, world, save
        self._config, self._model_folder = config, model_folder
        self._folder = ExitStack()
        self._begun = False
        self._calls: AsyncCallsQueue | None = None
        self._published: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")

    def begin(self, state: TrainState, policy: Policy) -> None:
        """Collective: start writing; with `asynchronous` off, this also ends it."""
        self.advance(wait=True)
        name = f"step-{state.total}"
        if self._world.rank == 0:
            folder = self._folder.enter_context(new_folder(self._root, name, keep=self._save.keep))
            state.write(folder)
            (folder / CONFIG).write_text(self._config, encoding="utf-8")
            _copy_side_files(self._model_folder, folder / SIDE)
        self._world.gather(None)  # the folder is there
        self._begun = True
        folder = self._root / f"{name}{UNFINISHED}"
        write_random_state(folder, self._world.rank)
        self._calls = write_shards(folder, policy.state(), self._save.asynchronous)
        self.advance(wait=not self._save.asynchronous)

    def advance(self, wait: bool) -> None:
        """Collective: bring what was begun as far as it is. wait: until it is published."""
        if not self._begun or not self._written(wait):
            return
        if self._world.rank == 0 and self._published is None:
            self._published = self._thread.submit(self._folder.close)
        done = self._published is None or wait or self._published.done()
        if self._published is not None and done:
            self._published.result()
        if self._world.gather(done)[0]:
            self._begun, self._published = False, None

    def _written(self, wait: bool) -> bool:
        """Collective: whether every process's shards are on the disk, or no checkpoint is being written."""
        if self._calls is None:
            return True
        if not complete(self._calls, wait):
            return False
        self._calls = None
        return True


def _copy_side_files(source: Path, target: Path) -> None:
    target.mkdir()
    for name in SIDE_FILES:
        if (source / name).exists():
            shutil.copy(source / name, target / name)


def restore(folder: Path, state: TrainState, policy: Policy, rollouts: Resumable, world: Team) -> None:
    """Collective: set everything to where `state`, read from the same folder, says that the run stood.

    With as many processes as before, their random number generators go on too; no layer draws from them.
    Raises CheckpointError where the folder does not fit the run.
    """
    policy.restore(read_shards(folder, policy.state(loading=True), every=True))
    rollouts.restore(state.rollouts)
    if world.size == state.processes:
        restore_random_state(folder, world.rank)


@dataclass
class SaveCheckpoint:
    """An action after each step of one stage: a checkpoint every so often, at the stage's end, and when told to stop.

    every: steps; 0: only when told to stop. done_before: steps of earlier stages. metrics_bytes: how long the metrics'
    file is. stopping: whether this process was told to stop. It comes last, so that the step it saves is complete.
    """

    checkpoints: Checkpoints
    world: Team
    stage: str
    every: int
    last: int
    done_before: int
    policy: Policy
    rollouts: Resumable
    metrics_bytes: Callable[[], int]
    stopping: Callable[[], bool]
    _seconds: float = field(default=0.0, init=False)

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        """Collective. Raises Interrupted, once the checkpoint is on the disk, where any process was told to stop."""
        start = time.perf_counter()
        with metrics.time("checkpoint"):  # recorded already; it tells the watchdog
            self.checkpoints.advance(wait=False)
            stops = any(self.world.gather(self.stopping()))
            if stops or (self.every and (step % self.every == 0 or step == self.last)):
                self.checkpoints.begin(self._state(step), self.policy)
            if stops or step == self.last:
                self.checkpoints.advance(wait=True)
        self._seconds = time.perf_counter() - start
        if stops:
            raise Interrupted(f"stopped after step {step} of {self.stage}; `--resume` goes on from there")

    def measure(self, step: int, metrics: StepMetrics) -> None:
        """The seconds that the checkpoint after the step before took from training, as `time/checkpoint`."""
        metrics.add("time/checkpoint", Max(self._seconds))

    def _state(self, step: int) -> TrainState:
        return TrainState(
            stage=self.stage,
            step=step,
            total=self.done_before + step,
            processes=self.world.size,
            metrics_bytes=self.metrics_bytes(),
            rollouts=self.rollouts.state(),
        )
