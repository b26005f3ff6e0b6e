"""Checkpoints of other layers than the ones used on a CPU have the same keys and boxes: a conversion fits them all.

Transformer Engine's modules are stand-ins that hold what the engine's hold; how that becomes keys and boxes is
Megatron-Core's own code, taken from its source. The grouped experts from before the engine are Megatron-Core's own.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe import experts

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.schema import Parallel
from gppo_megatron.policy.megatron.layers import engine_block
from gppo_megatron.policy.megatron.mapping.pieces import StoredLayout
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.shards import weights_state
from gppo_megatron.policy.megatron.stored_layout import FUSED_NORM, stored_layout
from tests.single_process import CPU, world_of_one
from tests.unit import test_engine_names as names
from tests.unit.test_mapping import CONFIGS, hf_tensors, tiny

SOURCE = ast.parse(inspect.getsource(transformer_engine))
DESCRIBING = ("sharded_state_dict", "_sharded_state_dict_grouped")
NO_TYPE_PARAMETERS: dict[str, Any] = {"type_params": []} if "type_params" in ast.ClassDef._fields else {}
Box = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def described_by_megatron(name: str, *bases: type) -> type:
    """A class whose description of its shards is that of Megatron-Core's wrapper `name`."""
    (found,) = (node for node in ast.walk(SOURCE) if isinstance(node, ast.ClassDef) and node.name == name)
    body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in DESCRIBING]
    assert body, f"{name} describes no shards"
    held = ast.ClassDef(
        name, [ast.Name(f"base{i}", ast.Load()) for i in range(len(bases))], [], body, [], **NO_TYPE_PARAMETERS
    )
    code = compile(ast.fix_missing_locations(ast.Module([held], [])), inspect.getfile(transformer_engine), "exec")
    space = vars(transformer_engine) | {f"base{i}": base for i, base in enumerate(bases)}
    exec(code, space)
    made: type = space[name]
    return made


class Grouped:
    """What Megatron-Core's wrappers ask a module for."""

    def __init__(self, *arguments: Any, tp_group: Any = None, pg_collection: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.config = options["config"]
        self._tp_group = tp_group if tp_group is not None else pg_collection.expt_tp if pg_collection else None
        self._pg_collection, self.use_bias = pg_collection, options.get("bias", False)
        self.num_gemms = arguments[0] if arguments else 0

    def _split_extra_state(self, state: torch.Tensor) -> list[torch.Tensor]:
        return [state] * self.num_gemms


def stand_ins() -> dict[str, type]:
    single = {
        "TEColumnParallelLinear": names.Linear,
        "TERowParallelLinear": names.Linear,
        "TELayerNormColumnParallelLinear": names.NormLinear,
        "TEDotProductAttention": names.Attention,
    }
    made = {name: described_by_megatron(name, Grouped, base) for name, base in single.items()}
    grouped = described_by_megatron("TEGroupedLinear", Grouped, names.GroupedLinear)
    made |= {
        name: described_by_megatron(name, grouped)
        for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
    }
    return made | {"TENorm": names.Norm}


def state_of(
    architecture: Architecture,
    monkeypatch: pytest.MonkeyPatch,
    fill: Callable[[Any], None] = lambda _: None,
    **fields: Any,
) -> dict[str, Any]:
    """What Megatron-Core would save of these layers. fields: of its configuration."""
    engine = not fields.get("moe_use_legacy_grouped_gemm")

    def layers(config: Any, virtual_stage: int | None) -> Any:
        config.moe_grouped_gemm = config.num_moe_experts is not None
        for field, value in fields.items():
            setattr(config, field, value)
        if engine:
            return engine_block(config, virtual_stage)
        return get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")

    monkeypatch.setattr("gppo_megatron.policy.megatron.model.local_block", layers)
    with world_of_one():
        config = transformer_config(architecture, Parallel(), CPU, torch.float32, {})
        (model,) = build_model(config, architecture, CPU)
        fill(model)
        state: dict[str, Any] = model.module.sharded_state_dict(prefix="")
        return state


def trained_state(architecture: Architecture) -> dict[str, Any]:
    """What a training run would save of the model's weights."""
    with world_of_one():
        config = transformer_config(architecture, Parallel(), CPU, torch.float32, {})
        state: dict[str, Any] = weights_state(build_model(config, architecture, CPU))["model"]
        return state


def use_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stand-ins serve as Transformer Engine's modules."""
    provider = transformer_engine_spec_provider
    for name, replacement in stand_ins().items():
        monkeypatch.setattr(provider, name, replacement)
    monkeypatch.setattr(provider, "is_te_min_version", lambda *_, **__: True)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider, raising=False)
    monkeypatch.setattr(gpt_layer_specs, "TENorm", names.Norm, raising=False)


def boxes_of(state: dict[str, Any]) -> dict[str, set[Box]]:
    """Where, by key, the numbers lie: offsets, sizes and the shape of the whole."""
    found: dict[str, set[Box]] = {}
    for value in state.values():
        if isinstance(value, ShardedObject):
            continue
        for box in boxes_in(value):
            sizes = (1,) * box.prepend_axis_num + tuple(box.local_shape)
            found.setdefault(box.key, set()).add((tuple(box.global_offset), sizes, tuple(box.global_shape)))
    return found


def place(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


def boxes_in(value: Any) -> Iterator[Any]:
    yield from flat(value.build() if isinstance(value, ShardedTensorFactory) else [value])


def flat(built: Any) -> Iterator[Any]:
    if isinstance(built, dict | list):
        for each in built.values() if isinstance(built, dict) else built:
            yield from flat(each)
    else:
        yield built


def boxes_written(layout: StoredLayout) -> dict[str, set[Box]]:
    """By a conversion."""
    found: dict[str, set[Box]] = {}
    for parameter in layout.parameters:
        for box in parameter.boxes:
            found.setdefault(box.key, set()).add((box.offsets, box.sizes, box.whole))
    return found


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_model_of_the_engines_layers_finds_every_box(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, _ = tiny(family, tied=False)
    use_engine(monkeypatch)
    state, layout = state_of(architecture, monkeypatch), stored_layout(architecture)
    asked, written = boxes_of(state), boxes_written(layout)
    assert asked.items() <= written.items()
    norms = {name.replace("pre_mlp_layernorm.weight", FUSED_NORM) for name in asked if "pre_mlp" in name}
    assert written.keys() - asked.keys() == norms, "Megatron-Core's own layers have the norm before experts there"
    assert bool(norms) == (family == "qwen3_moe")
    states = {value.unique_key for value in state.values() if isinstance(value, ShardedObject)}
    assert states <= set(layout.objects)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_run_saves_the_same_keys_and_boxes_of_either_layers(
    family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun on a CPU, it goes on with the engine's layers, and the other way about: all that is saved is read."""
    architecture, _ = tiny(family, tied)
    own = trained_state(architecture)
    use_engine(monkeypatch)

    def layers(config: Any, virtual_stage: int | None) -> Any:
        config.moe_grouped_gemm = config.num_moe_experts is not None
        return engine_block(config, virtual_stage)

    monkeypatch.setattr("gppo_megatron.policy.megatron.model.local_block", layers)
    engine = trained_state(architecture)
    assert boxes_of(own) == boxes_of(engine)
    assert not any(isinstance(value, ShardedObject) for state in (own, engine) for value in state.values())


@pytest.mark.filterwarnings("ignore:The legacy GroupedMLP")
@pytest.mark.skipif(not hasattr(experts, "GroupedMLP"), reason="newer versions of Megatron-Core have it no more")
def test_experts_of_the_older_grouped_form_are_stored_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """weight1 and weight2 over all experts, transposed: their numbers are set by the formula, expert by expert."""
    architecture, hf = tiny("qwen3_moe", tied=False)
    tensors = hf_tensors(hf)
    monkeypatch.setattr(experts.gg, "assert_grouped_gemm_is_available", lambda: None)

    def fill(model: Any) -> None:
        for number, layer in enumerate(model.module.decoder.layers):
            if not architecture.experts_in(number):
                continue
            stem = f"model.layers.{number}.mlp.experts"
            each = [[tensors[f"{stem}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")] for e in range(6)]
            held = layer.mlp.experts
            held.weight1.data.view(6, 32, 56).copy_(torch.stack([torch.cat([gate, up]).t() for gate, up, _ in each]))
            held.weight2.data.view(6, 28, 32).copy_(torch.stack([down.t() for _, _, down in each]))

    state = state_of(architecture, monkeypatch, fill, moe_use_legacy_grouped_gemm=True)
    stored, expected = {}, {}
    for box in (box for value in state.values() if not isinstance(value, ShardedObject) for box in boxes_in(value)):
        if ".experts." in box.key:
            whole = stored.setdefault(box.key, torch.full(box.global_shape, torch.nan))
            whole[place(box.global_offset, box.data.shape)] = box.data
    for parameter in stored_layout(architecture).parameters:
        if parameter.rule.expert is not None:
            held = parameter.rule.layout.shard([tensors[name] for name in parameter.rule.hf], 1, 0)
            for piece, part in zip(parameter.pieces, held.split([p.shape[0] for p in parameter.pieces]), strict=True):
                whole = expected.setdefault(piece.key, torch.full(piece.whole, torch.nan))
                whole[place(piece.offsets, piece.sizes)] = part
    assert stored.keys() == expected.keys()
    assert all(torch.equal(whole, expected[key]) for key, whole in stored.items())
