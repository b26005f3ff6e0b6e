"""Weights & Biases; imported only where a run asks for it."""

import math
from collections.abc import Mapping
from pathlib import Path

import wandb

from gppo_megatron.config.schema import Wandb
from gppo_megatron.observe.sinks import STAGES


class WeightsAndBiases:
    """Logs every metric as `<stage>/<metric>` over `<stage>/step`, and the resolved configuration.

    folder: the run's; wandb keeps its own files in it. Offline, `wandb sync` uploads them later.
    NaN, which is what was not measured, is left out.
    """

    def __init__(self, config: Wandb, folder: Path, run_config: Mapping[str, object]) -> None:
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or folder.name,
            mode=config.mode,
            dir=str(folder),
            config=dict(run_config),
        )
        for stage in STAGES:
            self._run.define_metric(f"{stage}/step")
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, step: int, stage: str, values: Mapping[str, float]) -> None:
        measured = {f"{stage}/{name}": value for name, value in values.items() if not math.isnan(value)}
        self._run.log({f"{stage}/step": step, **measured})

    def close(self) -> None:
        self._run.finish()
