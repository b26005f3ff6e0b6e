"""A Megatron model inside the test process: a world of one, torn down with the module that uses it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.schema import Memory, Parallel
from gppo_megatron.policy.megatron.arrangement import Arrangement, EndToEnd, Shares
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.topology import MegatronTopology, topology
from gppo_megatron.policy.megatron.update import MegatronModel, loaded_model
from gppo_megatron.policy.megatron.weights import load

CPU = torch.device("cpu")
NOTHING: Mapping[str, Any] = {}
PLAIN = Memory()


@contextmanager
def world_of_one() -> Iterator[MegatronTopology]:
    with topology(Parallel(), CPU, seed=1, timeout_seconds=60) as teams:
        yield teams


def model_of(
    folder: Path,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    megatron: Mapping[str, Any] = NOTHING,
    memory: Memory = PLAIN,
    arrange: Callable[[Shares], Arrangement] = EndToEnd,
    frozen: bool = False,
    replay: bool = False,
) -> MegatronModel:
    """The model of a Hugging Face folder, filled from its weights."""
    architecture = read_architecture(folder)
    config = transformer_config(architecture, Parallel(), CPU, dtype, megatron, memory, replay)
    chunks = build_model(config, architecture, CPU, Parallel(), memory, frozen)
    load(chunks, architecture, HfReader(folder))
    return loaded_model(chunks, architecture, temperature, CPU, arrange)


def logits_of(model: MegatronModel, tokens_BS: torch.Tensor) -> torch.Tensor:
    """[B, S, vocabulary], without gradient."""
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    with torch.no_grad():
        return model.chunks[0](tokens_BS, positions_BS, None)
