"""The policy as a Hugging Face folder."""

from dataclasses import dataclass
from pathlib import Path

from gppo_megatron.metrics import StepMetrics
from gppo_megatron.policy.api import Policy
from gppo_megatron.policy.megatron.hf_folder import write_hf_folder
from gppo_megatron.types import Team


@dataclass(frozen=True)
class SaveHf:
    """Writes `<folder>/hf-step-<step>` with the side files of the model it started from."""

    policy: Policy
    folder: Path
    model_folder: Path
    world: Team

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        """Collective."""
        with metrics.time("save"):
            self.write(self.folder / f"hf-step-{step}")

    def write(self, target: Path) -> None:
        """Collective: rank 0 writes, the others take part in gathering each tensor."""
        if self.world.rank == 0:
            write_hf_folder(target, self.policy.weights(), self.model_folder)
        else:
            for _ in self.policy.weights():
                pass
