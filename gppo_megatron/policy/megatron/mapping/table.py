"""One declarative table for every supported family: start-up, export and live weight sync all read it.

Names on the Megatron side are global: layer numbers count over all pipeline stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.policy.megatron.mapping.layouts import Cut, GateUp, GroupedQkv, Layout, Replicated, VocabRows

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine keeps a layer's norms inside the linear that follows them."""


@dataclass(frozen=True)
class Rule:
    """Megatron parameter `megatron` is made of the Hugging Face tensors `hf`, in this order, as `layout` says."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout


def rules(architecture: Architecture) -> dict[str, Rule]:
    """Every parameter of the model, by its Megatron name, in Hugging Face order."""
    return {rule.megatron: rule for rule in _rules(architecture)}


def _rules(a: Architecture) -> Iterator[Rule]:
    yield Rule(EMBEDDING, ("model.embed_tokens.weight",), VocabRows(a.vocab))
    for layer in range(a.layers):
        yield from _layer_rules(a, f"decoder.layers.{layer}", f"model.layers.{layer}")
    yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated())
    if not a.tied:
        yield Rule(HEAD, ("lm_head.weight",), VocabRows(a.vocab))


def _layer_rules(a: Architecture, ours: str, theirs: str) -> Iterator[Rule]:
    attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
    qkv = GroupedQkv(a.kv_heads, a.head_dim)
    yield Rule(f"{ours}.input_layernorm.weight", (f"{theirs}.input_layernorm.weight",), Replicated())
    for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
        names = tuple(f"{attention}.{part}_proj.{kind}" for part in "qkv")
        yield Rule(f"{ours}.self_attention.linear_qkv.{kind}", names, qkv)
    if a.qk_norm:
        for part in "qk":
            name = f"{ours}.self_attention.{part}_layernorm.weight"
            yield Rule(name, (f"{attention}.{part}_norm.weight",), Replicated())
    yield Rule(f"{ours}.self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",), Cut(1))
    yield Rule(f"{ours}.pre_mlp_layernorm.weight", (f"{theirs}.post_attention_layernorm.weight",), Replicated())
    yield Rule(f"{ours}.mlp.linear_fc1.weight", (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), GateUp())
    yield Rule(f"{ours}.mlp.linear_fc2.weight", (f"{mlp}.down_proj.weight",), Cut(1))


def global_name(local_name: str, first_layer: int) -> str:
    """The table's name of a parameter of one pipeline stage whose first layer is number `first_layer` (from 0).

    >>> global_name("module.decoder.layers.1.mlp.linear_fc1.layer_norm_weight", 2)
    'decoder.layers.3.pre_mlp_layernorm.weight'
    """
    name = local_name
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if not name.startswith("decoder.layers."):
        return name
    _, _, number, rest = name.split(".", 3)
    return f"decoder.layers.{int(number) + first_layer}.{FUSED_NORMS.get(rest, rest)}"
