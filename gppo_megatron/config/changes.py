"""Which keys may differ when a run goes on from a checkpoint. No torch."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from gppo_megatron.config.problems import config_error, show
from gppo_megatron.config.schema import RunConfig

FREE = (
    "run",
    "steps",
    "device",
    "threads",
    "parallel.",
    "memory.",
    "batch.micro_batch_tokens",
    "rollout.cache_tokens",
    "rollout.urls",
    "rollout.router",
    "rollout.start",
    "judge.",
    "diagnostics.peak_tflops",
    "evaluation.",
    "save.",
    "watchdog.",
    "gap_alarm.",
    "wandb",
)
"""Keys, and sections, that change where and how fast a run computes, and what it reports, but not what it learns.

`steps` is free only where no learning-rate schedule ends with it.
"""


def check_changes(saved: RunConfig, given: RunConfig, source: str) -> None:
    """Raises one ConfigError, headed by `source`, that lists every key in which the run would no longer be itself."""
    problems = [
        f"{name}: cannot change when a run goes on: {show(before)} when the checkpoint was saved (got {show(now)})"
        for name, before, now in _differences(saved, given, "")
        if not is_free(name)
    ]
    optimizer = given.optimizer
    if given.steps != saved.steps and optimizer.schedule != "constant" and optimizer.decay_steps is None:
        problems.append(
            "steps: cannot change when a run goes on, because the learning rate reaches optimizer.min_lr with the last "
            f"step: {saved.steps} when the checkpoint was saved (got {given.steps})"
        )
    if problems:
        raise config_error(source, problems)


def is_free(name: str) -> bool:
    """Whether a key, written as a dotted path, may differ."""
    return any(name == free or name.startswith(free if free.endswith(".") else f"{free}.") for free in FREE)


def _differences(saved: Any, given: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Dotted path, old and new value of every key that differs; a section of another kind counts as one."""
    for item in fields(saved):
        before, now = getattr(saved, item.name), getattr(given, item.name)
        if is_dataclass(before) and type(before) is type(now):
            yield from _differences(before, now, f"{prefix}{item.name}.")
        elif before != now:
            yield f"{prefix}{item.name}", before, now
