"""What makes a stage of a run outlive its processes: checkpoints, SIGTERM, the watchdog."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from gppo_megatron.config.schema import RunConfig
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.observe.stop_request import StopRequest
from gppo_megatron.observe.watchdog import Watchdog
from gppo_megatron.policy.api import Policy
from gppo_megatron.policy.megatron.checkpoint import Checkpoints, SaveCheckpoint, restore
from gppo_megatron.policy.megatron.checkpoint import Policy as Storable
from gppo_megatron.run_folder import Standing
from gppo_megatron.train import Run
from gppo_megatron.types import Team


class StorablePolicy(Policy, Storable, Protocol):
    """Trains, and has a state."""


@dataclass(frozen=True)
class Lasting:
    """Of one run. standing: where an earlier process left it. metrics_bytes: how long the metrics' file is."""

    config: RunConfig
    checkpoints: Checkpoints
    world: Team
    standing: Standing | None
    stop: StopRequest
    watchdog: Watchdog
    metrics_bytes: Callable[[], int]

    def warmup_is_over(self) -> bool:
        return self.standing is not None and self.standing.state.stage == "train"

    def stage(self, name: str, run: Run, policy: StorablePolicy) -> Run:
        """Collective: the stage with checkpoints, set to where an earlier process left it, and watched over.

        The last of its actions must be the one that records.
        """
        warmup = self.config.warmup
        save = SaveCheckpoint(
            checkpoints=self.checkpoints,
            world=self.world,
            stage=name,
            every=self.config.save.checkpoint_every,
            last=run.steps,
            done_before=warmup.steps if warmup and name == "train" else 0,
            policy=policy,
            rollouts=run.rollouts,
            metrics_bytes=self.metrics_bytes,
            stopping=self.stop.came,
        )
        *actions, record = run.after_step
        run = replace(
            run,
            after_step=(*actions, save.measure, record, save),
            measure=lambda step: StepMetrics(entering=lambda phase: self.watchdog.enter(f"{name} {step}: {phase}")),
        )
        if self.standing is None or self.standing.state.stage != name:
            return run
        restore(self.standing.checkpoint, self.standing.state, policy, run.rollouts, self.world)
        return replace(run, first=self.standing.state.step + 1, at_start=())
