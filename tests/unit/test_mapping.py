"""The mapping table: exact both ways, for every family, at every tensor-parallel size."""

import dataclasses

import pytest
import torch
import transformers

from gppo_megatron.config.architecture import Architecture, parse_hf_config
from gppo_megatron.policy.megatron.mapping.layouts import Cut, GateUp, GroupedQkv, Replicated, VocabRows
from gppo_megatron.policy.megatron.mapping.table import FUSED_NORMS, global_name, rules

CONFIGS = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
}


def tiny(family: str, tied: bool) -> tuple[Architecture, torch.nn.Module]:
    """The architecture and a random Hugging Face model: 8 heads, 4 key-value heads, a vocabulary no size divides."""
    config = CONFIGS[family](
        vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, tie_word_embeddings=tied, sliding_window=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return parse_hf_config(config.to_dict(), family), transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_tensor_of_a_family_round_trips_exactly(family: str, tied: bool) -> None:
    architecture, model = tiny(family, tied)
    tensors = dict(model.named_parameters())
    seen = set()
    for rule in rules(architecture).values():
        originals = [tensors[name] for name in rule.hf]
        seen.update(rule.hf)
        for size in (1, 2, 4):
            parts = [rule.layout.shard(originals, size, rank) for rank in range(size)]
            assert len({part.shape for part in parts}) == 1
            for name, original, merged in zip(rule.hf, originals, rule.layout.merge(parts), strict=True):
                assert torch.equal(original, merged), (name, size)
    assert seen == set(tensors)


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
