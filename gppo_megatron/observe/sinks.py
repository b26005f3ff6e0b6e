"""The seam to whatever keeps or shows a step's numbers."""

from collections.abc import Mapping
from typing import Protocol

STAGES = ("warmup", "train")
TIMING_GROUPS = ("time/", "speed/")


def is_timing(name: str) -> bool:
    """Whether a metric depends on the machine's speed: all others are equal for equal seeds."""
    return name.startswith(TIMING_GROUPS)


class Sink(Protocol):
    """Takes the numbers of one step after another, on one process of the run."""

    def write(self, step: int, stage: str, values: Mapping[str, float]) -> None:
        """Keep or show one step.

        `stage` is "warmup" or "train"; `step` counts from 1 inside it, and 0 is what was measured before its first.
        """
        ...

    def close(self) -> None:
        """Finish whatever is open; nothing may be written afterwards."""
        ...
