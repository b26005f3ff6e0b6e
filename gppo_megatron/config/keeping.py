"""Keys about what a run leaves behind, and how it survives. Part of `schema`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Save:
    """Hugging Face folders: `<run>/hf` at the end, and `<run>/hf-step-N` every `every` steps (0: never).

    checkpoint_every: steps between checkpoints that the run can go on from; 0: only when it is told to stop.
    keep: how many of them stay. asynchronous: write them while training goes on.
    grace: seconds from SIGTERM to the end; a step and a checkpoint must fit.
    """

    every: int = 0
    checkpoint_every: int = 100
    keep: int = 2
    asynchronous: bool = False
    grace: float = 60.0


@dataclass(frozen=True)
class Watchdog:
    """When a run is given up as stuck, in seconds.

    silence: a process shows no sign of life. phase: it works at one part of a step: a rollout, an update, a save.
    """

    silence: float = 120.0
    phase: float = 1800.0


@dataclass(frozen=True)
class GapAlarm:
    """When sampler and trainer disagree too much on tokens of the same weights; limits in nats.

    mean: of `policy/sampler_gap`; null: 1e-3 in float32, 0.1 in bfloat16. largest: of `policy/sampler_gap_max`; null:
    no limit. steps: in a row above a limit, after which the run is warned or stopped.
    """

    mean: float | None = None
    largest: float | None = None
    steps: int = 3
    action: Literal["warn", "stop"] = "warn"


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases, besides the files of the run folder; needs the extra `wandb`.

    name: of the run, by default its folder's; entity: the account or team. offline: `wandb sync` uploads later.
    """

    project: str
    name: str | None = None
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"
