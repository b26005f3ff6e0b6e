"""From every rank's measurements to one line of numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gppo_megatron.errors import VerifierError
from gppo_megatron.metrics import Last, StepMetrics
from gppo_megatron.observe.sinks import Sink
from gppo_megatron.types import Team


@dataclass(frozen=True)
class Record:
    """Combines the step's metrics over `world` and writes them to the sinks, which only rank 0 has.

    peak_flops: operations a second that the device of a process can do at most; None where that is not known.
    """

    world: Team
    stage: str
    sinks: Sequence[Sink]
    peak_flops: float | None = None

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        """Collective: gathers from every rank; each metric's type decides how it combines.

        Raises VerifierError, once the step is written, where answers were judged and none got a verdict.
        """
        combined = StepMetrics()
        for of_rank in self.world.gather(metrics):
            combined.merge(of_rank)
        values = combined.flat()
        if "rollout/sampled_tokens" in values:
            sampled = values["rollout/sampled_tokens"]
            combined.add("speed/tokens_per_second", Last(sampled / values["time/step"]))
            combined.add("speed/sampled_tokens_per_second", Last(sampled / values["time/rollout"]))
            combined.add("speed/waiting_share", Last(values["time/rollout"] / values["time/step"]))
        if self.peak_flops is not None and "speed/update_flops" in values:
            possible = values["time/update"] * self.peak_flops * self.world.size
            combined.add("speed/mfu", Last(values["speed/update_flops"] / possible))
        for sink in self.sinks:
            sink.write(step, self.stage, combined.flat())
        if values.get("rollout/no_score", 0.0) > 0 and math.isnan(values["rollout/reward"]) and self.world.rank == 0:
            failed = {
                name.removeprefix("rollout/verdict_"): n for name, n in values.items() if "verdict_" in name and n
            }
            raise VerifierError(
                f"step {step}: none of the {values['rollout/no_score']:.0f} answers got a verdict "
                f"({', '.join(f'{status} {count:.0f}' for status, count in failed.items())}); "
                "try the verifier on one of them, or raise judge.timeout"
            )
