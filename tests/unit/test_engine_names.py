"""Under Transformer Engine's layers the same table holds: checked without it.

Megatron-Core's own specification builds the model; only the engine's classes are replaced, by modules that hold what
the engine's hold. Their parameters' names are also looked for in Megatron-Core's source.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.transformer_config import TransformerConfig

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.schema import Parallel
from gppo_megatron.policy.megatron.layers import engine_block
from gppo_megatron.policy.megatron.mapping.table import FUSED_NORMS, rules
from gppo_megatron.policy.megatron.model import build_model, named_buffers, named_parameters, transformer_config
from tests.single_process import CPU, world_of_one
from tests.unit.test_mapping import CONFIGS, hf_tensors, tiny


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


class Held(torch.nn.Module):
    """What an engine's module keeps besides parameters: a state that is no parameter."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))


class Linear(Held):
    def __init__(self, inputs: int, outputs: int, *_: Any, bias: bool = False, **__: Any) -> None:
        super().__init__()
        self.add("weight", outputs, inputs)
        if bias:
            self.add("bias", outputs)


class NormLinear(Linear):
    def __init__(self, inputs: int, outputs: int, *_: Any, **options: Any) -> None:
        super().__init__(inputs, outputs, **options)
        self.add("layer_norm_weight", inputs)


class GroupedLinear(Held):
    def __init__(self, count: int, inputs: int, outputs: int, **_: Any) -> None:
        super().__init__()
        for number in range(count):
            self.add(f"weight{number}", outputs, inputs)


class Norm(Held):
    def __init__(self, config: TransformerConfig, hidden_size: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.add("weight", hidden_size)


class Attention(Held):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


ENGINE = {
    "TEColumnParallelLinear": Linear,
    "TERowParallelLinear": Linear,
    "TELayerNormColumnParallelLinear": NormLinear,
    "TEColumnParallelGroupedLinear": GroupedLinear,
    "TERowParallelGroupedLinear": GroupedLinear,
    "TEDotProductAttention": Attention,
    "TENorm": Norm,
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = transformer_engine_spec_provider
    for name, replacement in ENGINE.items():
        assert hasattr(provider, name), name
        monkeypatch.setattr(provider, name, replacement)
    monkeypatch.setattr(provider, "is_te_min_version", lambda *_, **__: True)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider, raising=False)
    monkeypatch.setattr(gpt_layer_specs, "TENorm", Norm, raising=False)


def built(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model as it is on a GPU with the engine, though on the CPU."""

    def layers(config: TransformerConfig, virtual_stage: int | None) -> Any:
        config.moe_grouped_gemm = config.num_moe_experts is not None
        return engine_block(config, virtual_stage)

    monkeypatch.setattr("gppo_megatron.policy.megatron.model.local_block", layers)
    config = transformer_config(architecture, Parallel(), CPU, torch.float32, {})
    return build_model(config, architecture, CPU)


@pytest.mark.usefixtures("engine")
def test_attention_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes packed sequences by their bounds; on a CPU the same bounds go to this project's own."""
    model = built(tiny("qwen3", tied=False)[0], monkeypatch)
    layers = model[0].module.decoder.layers
    assert len(layers) == 4
    assert all(type(layer.self_attention.core_attention) is Attention for layer in layers)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_parameter_has_its_rule_and_shape(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, hf = tiny(family, tied=False)
    tensors, table = hf_tensors(hf), rules(architecture)
    model = built(architecture, monkeypatch)
    held = {name: tuple(parameter.shape) for name, parameter in named_parameters(model)}
    assert held == {
        name: tuple(rule.layout.shard([tensors[hf_name] for hf_name in rule.hf], 1, 0).shape)
        for name, rule in table.items()
    }
    assert not [name for name, tensor in named_buffers(model) if tensor.is_floating_point()]
    raw = [name for name, _ in model[0].module.named_parameters()]
    assert any(name.endswith("linear_qkv.layer_norm_weight") for name in raw), "norms must be fused here"
    assert any(name.endswith("mlp.experts.linear_fc1.weight5") for name in raw) == (family == "qwen3_moe")
    assert any(name.endswith("_extra_state") for name in model[0].module.state_dict())


def test_the_names_are_those_that_megatron_uses_of_the_engine() -> None:
    spec, wrappers = inspect.getsource(gpt_layer_specs), inspect.getsource(transformer_engine)
    assert '"mlp.linear_fc1.layer_norm_weight"' in spec
    assert "mlp.linear_fc1.layer_norm_weight" in FUSED_NORMS
    grouped = wrappers[wrappers.index("class TEGroupedLinear(") :]
    assert '{prefix}weight{gemm_idx}"' in grouped
    assert '_extra_state"' in grouped
    assert "linear_qkv.layer_norm_weight" in (
        inspect.getsource(inspect.getmodule(gpt_layer_specs.TransformerLayer)) + wrappers + _attention_source()
    )


def _attention_source() -> str:
    return Path(inspect.getfile(gpt_layer_specs.SelfAttention)).read_text(encoding="utf-8")
