"""One declarative table for every supported family: start-up, export and live weight sync all read it.

Names on the Megatron side are global: layers count over all pipeline stages, experts over all expert-parallel ranks.
"""

import re
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

EXPERT_FORMS = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<linear>linear_fc[12])\.weight"),
    re.compile(r"mlp\.experts\.(?P<linear>linear_fc[12])\.weight(?P<expert>\d+)"),
)
"""One module an expert; Transformer Engine keeps all of a rank's experts in one module, numbered by parameter."""


@dataclass(frozen=True)
class Rule:
    """Megatron parameter `megatron` is made of the Hugging Face tensors `hf`, in this order, as `layout` says.

    expert: its number, where it belongs to one: then the cut is over expert-tensor-parallel ranks, and only one
    expert-parallel rank holds it. None: the cut is over tensor-parallel ranks.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    expert: int | None = None


def rules(architecture: Architecture) -> dict[str, Rule]:
    """Every parameter of the model, by its Megatron name, in Hugging Face order."""
    return {rule.megatron: rule for rule in _rules(architecture)}


def _rules(a: Architecture) -> Iterator[Rule]:
    yield Rule(EMBEDDING, ("model.embed_tokens.weight",), VocabRows(a.vocab))
    for layer in range(a.layers):
        yield from _layer_rules(a, f"decoder.layers.{layer}", f"model.layers.{layer}", a.experts_in(layer))
    yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated())
    if not a.tied:
        yield Rule(HEAD, ("lm_head.weight",), VocabRows(a.vocab))


def _layer_rules(a: Architecture, ours: str, theirs: str, experts: int) -> Iterator[Rule]:
    """experts: of this layer; 0 for a plain MLP."""
    attention = f"{theirs}.self_attn"
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
    if not experts:
        yield from _mlp_rules(f"{ours}.mlp", f"{theirs}.mlp", None)
        return
    yield Rule(f"{ours}.mlp.router.weight", (f"{theirs}.mlp.gate.weight",), Replicated())
    for expert in range(experts):
        yield from _mlp_rules(f"{ours}.mlp.experts.{expert}", f"{theirs}.mlp.experts.{expert}", expert)


def _mlp_rules(ours: str, theirs: str, expert: int | None) -> Iterator[Rule]:
    gate_up = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
    yield Rule(f"{ours}.linear_fc1.weight", gate_up, GateUp(), expert)
    yield Rule(f"{ours}.linear_fc2.weight", (f"{theirs}.down_proj.weight",), Cut(1), expert)


def global_name(local_name: str, first_layer: int, first_expert: int = 0) -> str:
    """The table's name of a parameter of one rank's part of the model.

    first_layer: number of the part's first layer, from 0. first_expert: number of the rank's first expert.

    >>> global_name("module.decoder.layers.1.mlp.linear_fc1.layer_norm_weight", 2)
    'decoder.layers.3.pre_mlp_layernorm.weight'
    >>> global_name("decoder.layers.0.mlp.experts.linear_fc2.weight1", 0, 4)
    'decoder.layers.0.mlp.experts.5.linear_fc2.weight'
    """
    name = local_name
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if not name.startswith("decoder.layers."):
        return name
    _, _, number, rest = name.split(".", 3)
    rest = FUSED_NORMS.get(rest, rest)
    for form in EXPERT_FORMS:
        if (match := form.fullmatch(rest)) is not None:
            rest = f"mlp.experts.{int(match['expert']) + first_expert}.{match['linear']}.weight"
            break
    return f"decoder.layers.{int(number) + first_layer}.{rest}"
