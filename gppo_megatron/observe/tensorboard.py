"""TensorBoard event files."""

import math
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes every metric as the scalar `<stage>/<metric>` to an event file in `folder`, made if missing.

    NaN, which is what was not measured, is left out.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def write(self, step: int, stage: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if not math.isnan(value):
                self._writer.add_scalar(f"{stage}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()
