"""The alarm over the gap between the sampler's log-probs and the trainer's."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gppo_megatron.errors import SyncError
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.types import Team


@dataclass
class GapAlarm:
    """An action after each step. limits: of metrics, in nats. steps: in a row above one, until it speaks.

    A step in which nothing was measured counts neither way.
    """

    world: Team
    limits: Mapping[str, float]
    steps: int
    action: Literal["warn", "stop"]
    _in_a_row: int = field(default=0, init=False)

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        """Collective. Raises SyncError, on every process, where it is to stop the run; warns once for each time that
        the gap stays above a limit."""
        combined = StepMetrics()
        for part in self.world.gather({name: metric for name, metric in metrics.items() if name in self.limits}):
            combined.merge(StepMetrics(part))
        values = combined.flat()
        if all(math.isnan(value) for value in values.values()):
            return
        above = [name for name, limit in self.limits.items() if values.get(name, math.nan) > limit]
        self._in_a_row = self._in_a_row + 1 if above else 0
        if self._in_a_row < self.steps or (self.action == "warn" and self._in_a_row > self.steps):
            return
        text = self._text(step, above[0], values[above[0]])
        if self.action == "stop":
            raise SyncError(text)
        if self.world.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def _text(self, step: int, name: str, value: float) -> str:
        return (
            f"step {step}: {name} is {value:.2g} nats, above its limit of {self.limits[name]:g}, for {self._in_a_row} "
            "steps in a row: the sampler does not compute what the trainer computes; check the servers' weights, dtype "
            "and model folder, or raise the limit in gap_alarm"
        )
