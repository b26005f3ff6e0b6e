"""The weights of a model folder or of a distributed checkpoint, for one process that only reads them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gppo_megatron.checkpoint.metadata import is_distributed
from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.schema import Parallel
from gppo_megatron.policy.api import NamedTensor
from gppo_megatron.policy.megatron.export import WeightExporter
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.mapping.table import rules
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.shards import load_weights, read_shards, weights_state
from gppo_megatron.policy.megatron.topology import topology

SIDE = "hf"
TIMEOUT_SECONDS = 60.0


def side_folder(folder: Path) -> Path:
    """Where config.json and the tokenizer lie: in a distributed checkpoint's folder `hf`."""
    return folder / SIDE if is_distributed(folder) else folder


@contextmanager
def stored_weights(
    folder: Path, architecture: Architecture, device: torch.device, dtype: torch.dtype, extra: Mapping[str, Any]
) -> Iterator[Iterator[NamedTensor]]:
    """Inside, every tensor under its Hugging Face name. extra: the run's `megatron:`.

    A distributed checkpoint's weights are read whatever the layout they were written in; its optimizer is left alone.
    Raises CheckpointError where the folder does not fit the model.
    """
    if not is_distributed(folder):
        reader = HfReader(folder)
        names = (name for rule in rules(architecture).values() for name in rule.hf)
        yield (NamedTensor(name, reader.read(name)) for name in names)
        return
    with topology(Parallel(), device, seed=1, timeout_seconds=TIMEOUT_SECONDS):
        chunks = build_model(transformer_config(architecture, Parallel(), device, dtype, extra), architecture, device)
        load_weights(chunks, read_shards(folder, weights_state(chunks), every=False))
        yield WeightExporter(chunks, architecture)()
