"""From every rank's measurements to one line of numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from gppo_megatron.metrics import Last, StepMetrics
from gppo_megatron.observe.sinks import Sink
from gppo_megatron.types import Team


@dataclass(frozen=True)
class Record:
    """Combines the step's metrics over `world` and writes them to the sinks, which only rank 0 has."""

    world: Team
    stage: str
    sinks: Sequence[Sink]

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        """Collective: gathers from every rank; each metric's type decides how it combines."""
        combined = StepMetrics()
        for of_rank in self.world.gather(metrics):
            combined.merge(of_rank)
        values = combined.flat()
        if "rollout/sampled_tokens" in values:
            sampled = values["rollout/sampled_tokens"]
            combined.add("speed/tokens_per_second", Last(sampled / values["time/step"]))
            combined.add("speed/sampled_tokens_per_second", Last(sampled / values["time/rollout"]))
        for sink in self.sinks:
            sink.write(step, self.stage, combined.flat())
