"""The mapping table: exact both ways, for every family, however the model is cut."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import transformers

from gppo_megatron.config.architecture import Architecture, parse_hf_config
from gppo_megatron.data.fused_experts import one_expert_at_a_time
from gppo_megatron.policy.megatron.mapping.layouts import Cut, GateUp, GroupedQkv, Replicated, VocabRows
from gppo_megatron.policy.megatron.mapping.table import FUSED_NORMS, global_name, rules

CONFIGS = {
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
}
LAYERS, EXPERTS = 4, 6
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "mlp_only_layers": [1]}


class Cuts(NamedTuple):
    """Sizes; experts and their tensors are cut over processes of their own."""

    tensor: int
    pipeline: int
    expert: int = 1
    expert_tensor: int = 1


DENSE = [Cuts(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2)]
SPARSE = [
    Cuts(tensor, pipeline, expert, expert_tensor)
    for tensor in (1, 2, 4)
    for pipeline in (1, 2)
    for expert in (1, 2)
    for expert_tensor in (1, 2, 4)
]


def tiny(family: str, tied: bool) -> tuple[Architecture, torch.nn.Module]:
    """The architecture and a random Hugging Face model: no two dimensions are equal, 2 key-value heads are fewer than
    4 ranks, and no size divides the vocabulary. Biases and norms are random too."""
    config = CONFIGS[family](
        vocab_size=37, hidden_size=32, intermediate_size=40, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=2, head_dim=10, tie_word_embeddings=tied, sliding_window=None,
        **(MOE if family == "qwen3_moe" else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return parse_hf_config(config.to_dict(), family), model


def hf_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """As files name them."""
    parts = [one_expert_at_a_time(name, parameter) for name, parameter in model.named_parameters()]
    return {name: tensor.detach() for part in parts for name, tensor in part}


def local_name(name: str, first_layer: int, first_expert: int, engine: bool) -> str:
    """What Megatron calls it on a rank, by its own modules or by those of Transformer Engine."""
    words = name.split(".")
    if not name.startswith("decoder.layers."):
        return f"module.{name}"
    words[2] = str(int(words[2]) - first_layer)
    if "experts" in words:
        expert = str(int(words[5]) - first_expert)
        words[5:] = [words[6], f"weight{expert}"] if engine else ["local_experts", expert, *words[6:]]
    elif engine:
        fused = {plain: fused for fused, plain in FUSED_NORMS.items()}
        rest = ".".join(words[3:])
        words[3:] = fused.get(rest, rest).split(".")
    return f"module.module.{'.'.join(words)}"


class Part(NamedTuple):
    """One parameter as one rank holds it."""

    name: str
    shard: int
    tensor: torch.Tensor


def parts(architecture: Architecture, tensors: dict[str, torch.Tensor], cuts: Cuts, engine: bool) -> Iterator[Part]:
    """Every parameter of every rank, under its name there turned into the table's."""
    in_stage, in_rank = LAYERS // cuts.pipeline, EXPERTS // cuts.expert
    for name, rule in rules(architecture).items():
        stage = int(name.split(".")[2]) // in_stage if ".layers." in name else 0
        expert_rank = 0 if rule.expert is None else rule.expert // in_rank
        here = local_name(name, stage * in_stage, expert_rank * in_rank, engine)
        size = cuts.tensor if rule.expert is None else cuts.expert_tensor
        for shard in range(size):
            tensor = rule.layout.shard([tensors[hf] for hf in rule.hf], size, shard)
            yield Part(global_name(here, stage * in_stage, expert_rank * in_rank), shard, tensor)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("engine", [False, True])
def test_every_tensor_of_a_family_round_trips_exactly(family: str, tied: bool, engine: bool) -> None:
    architecture, model = tiny(family, tied)
    tensors = hf_tensors(model)
    table = rules(architecture)
    for cuts in SPARSE if family == "qwen3_moe" else DENSE:
        held: dict[str, dict[int, torch.Tensor]] = {}
        for part in parts(architecture, tensors, cuts, engine):
            assert part.shard not in held.setdefault(part.name, {}), part.name
            held[part.name][part.shard] = part.tensor
        assert set(held) == set(table)
        back: dict[str, torch.Tensor] = {}
        for name, shards in held.items():
            in_order = [shards[shard] for shard in range(len(shards))]
            assert len({part.shape for part in in_order}) == 1
            back.update(zip(table[name].hf, table[name].layout.merge(in_order), strict=True))
        assert set(back) == set(tensors)
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items()), cuts


def test_some_layers_of_a_sparse_model_are_dense() -> None:
    architecture, model = tiny("qwen3_moe", tied=False)
    assert architecture.experts is not None
    assert architecture.experts.dense == {1}
    assert [architecture.experts_in(layer) for layer in range(LAYERS)] == [6, 0, 6, 6]
    stepped = parse_hf_config(model.config.to_dict() | {"decoder_sparse_step": 2}, "x").experts
    assert stepped is not None
    assert stepped.dense == {0, 1, 2}


def test_experts_alone_have_a_number() -> None:
    """It decides which processes a parameter is cut over."""
    for name, rule in rules(tiny("qwen3_moe", tied=False)[0]).items():
        words = name.split(".")
        assert rule.expert == (int(words[words.index("experts") + 1]) if "experts" in words else None), name


def test_both_forms_of_experts_have_the_same_names_and_numbers() -> None:
    fused = torch.arange(2 * 6 * 3.0).view(2, 6, 3)
    split = dict(one_expert_at_a_time("a.mlp.experts.gate_up_proj", fused))
    assert list(split) == [f"a.mlp.experts.{e}.{part}_proj.weight" for e in (0, 1) for part in ("gate", "up")]
    assert torch.equal(split["a.mlp.experts.1.up_proj.weight"], fused[1, 3:])
    split["a.mlp.experts.1.up_proj.weight"].zero_()
    assert not fused[1, 3:].any(), "a view, so that loading one expert fills the fused tensor"
    down = dict(one_expert_at_a_time("a.mlp.experts.down_proj", fused))
    assert torch.equal(down["a.mlp.experts.0.down_proj.weight"], fused[0])
    assert dict(one_expert_at_a_time("a.mlp.down_proj.weight", fused[0])).keys() == {"a.mlp.down_proj.weight"}


def test_grouped_qkv_interleaves_by_key_value_head() -> None:
    """Rows named q<head>, k<head>, v<head> with head_dim 1: 4 query heads, 2 key-value heads."""
    q, k, v = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    layout = GroupedQkv(kv_heads=2, head_dim=1)
    assert layout.shard([q, k, v], 1, 0).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert layout.shard([q, k, v], 2, 1).flatten().tolist() == [2, 3, 11, 21]


def test_gate_and_up_are_cut_apart() -> None:
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14)[:, None]
    assert GateUp().shard([gate, up], 2, 1).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_rows_are_padded_with_zeros_at_the_end() -> None:
    rows = torch.arange(1.0, 6)[:, None]
    assert VocabRows(5).shard([rows], 2, 1).flatten().tolist() == [4, 5, 0]
    assert VocabRows(5).shard([rows], 4, 3).flatten().tolist() == [0, 0]


def test_layouts_are_linear_so_gradients_map_as_weights_do() -> None:
    generator = torch.Generator().manual_seed(1)
    layouts = [(Replicated(), [(8, 4)]), (Cut(1), [(8, 4)]), (GateUp(), [(8, 4), (8, 4)]),
               (GroupedQkv(2, 2), [(8, 4), (4, 4), (4, 4)]), (VocabRows(7), [(7, 4)])]  # fmt: skip
    for layout, shapes in layouts:
        a = [torch.randn(shape, generator=generator) for shape in shapes]
        b = [torch.randn(shape, generator=generator) for shape in shapes]
        combined = layout.shard([x + 2 * y for x, y in zip(a, b, strict=True)], 2, 1)
        torch.testing.assert_close(combined, layout.shard(a, 2, 1) + 2 * layout.shard(b, 2, 1))


def test_global_names_count_layers_over_stages_and_undo_fused_norms() -> None:
    assert global_name("decoder.layers.0.mlp.linear_fc2.weight", 6) == "decoder.layers.6.mlp.linear_fc2.weight"
    assert global_name("module.embedding.word_embeddings.weight", 6) == "embedding.word_embeddings.weight"
    for fused, plain in FUSED_NORMS.items():
        assert global_name(f"module.module.decoder.layers.1.{fused}", 2) == f"decoder.layers.3.{plain}"


def test_a_tied_model_has_no_head_of_its_own() -> None:
    architecture, _ = tiny("qwen3", tied=True)
    names = {name for rule in rules(architecture).values() for name in rule.hf}
    untied = {name for rule in rules(dataclasses.replace(architecture, tied=False)).values() for name in rule.hf}
    assert untied - names == {"lm_head.weight"}
