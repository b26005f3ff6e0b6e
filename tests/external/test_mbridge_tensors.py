"""The mapping table against mbridge's: the same Hugging Face names make up each Megatron parameter, and the same
numbers end up on each tensor-parallel rank.

Only mbridge's maps of names and tensors are called: its models need Transformer Engine.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mbridge.models.llama import LLaMABridge  # type: ignore[import-not-found]
from mbridge.models.qwen2 import Qwen2Bridge  # type: ignore[import-not-found]
from mbridge.models.qwen3 import Qwen3Bridge  # type: ignore[import-not-found]
from mbridge.models.qwen3moe import Qwen3MoEBridge  # type: ignore[import-not-found]

from gppo_megatron.policy.megatron.mapping.table import EMBEDDING, HEAD, rules
from tests.unit.test_mapping import hf_tensors, local_name, tiny

BRIDGES = {"llama": LLaMABridge, "qwen2": Qwen2Bridge, "qwen3": Qwen3Bridge, "qwen3_moe": Qwen3MoEBridge}


def bridge_of(family: str, hf_config: Any) -> Any:
    """Without its Megatron configuration, which wants an older transformers."""
    bridge = object.__new__(BRIDGES[family])
    bridge.hf_config, bridge.dtype = hf_config, torch.float32
    bridge.config, bridge.make_vocab_size_divisible_by = SimpleNamespace(gated_linear_unit=True), None
    return bridge


@pytest.mark.parametrize("family", sorted(BRIDGES))
def test_names_and_tensors_are_those_of_mbridge(family: str) -> None:
    architecture, model = tiny(family, tied=False)
    tensors, bridge = hf_tensors(model), bridge_of(family, model.config)
    compared = 0
    for name, rule in rules(architecture).items():
        theirs = local_name(name, 0, 0, engine=True).replace("module.", "")
        if family == "qwen3_moe" and ".layers.1.mlp." in name:
            continue  # mbridge knows no dense layer among sparse ones
        if family == "qwen3_moe" and name.endswith("pre_mlp_layernorm.weight"):
            theirs = name  # a norm before experts is a module of its own
        assert tuple(bridge._weight_name_mapping_mcore_to_hf(theirs)) == rule.hf
        whole = bridge._weight_to_mcore_format(theirs, [tensors[hf] for hf in rule.hf])
        for size in (1, 2, 4):
            ours = [rule.layout.shard([tensors[hf] for hf in rule.hf], size, rank) for rank in range(size)]
            if len(whole) % size and name in (EMBEDDING, HEAD):
                continue  # mbridge pads to another multiple
            parts = bridge._weight_split_across_tp(theirs, whole, ours[0], size)
            assert all(torch.equal(part, own) for part, own in zip(parts, ours, strict=True)), (name, size)
            compared += 1
    assert compared > 75
