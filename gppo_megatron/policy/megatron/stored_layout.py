"""The keys and boxes of a model's distributed checkpoint, as the installed Megatron-Core lays them out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.schema import Parallel
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.gpt import GPT
from gppo_megatron.policy.megatron.mapping.pieces import Piece, StoredLayout, StoredParameter
from gppo_megatron.policy.megatron.mapping.table import Rule, global_name, rules
from gppo_megatron.policy.megatron.model import transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.topology import topology

TIMEOUT_SECONDS = 60.0
FUSED_NORM, NORM, ROUTER = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight", "mlp.router.weight"
MODULES_OF_NORMS = (NORM, "q_layernorm.weight", "k_layernorm.weight", "final_layernorm.weight")


def stored_layout(architecture: Architecture) -> StoredLayout:
    """Builds the model on the meta device, in a process group of one: no weights, no other process.

    Raises CheckpointError where Megatron's model and the mapping table do not name the same parameters.
    """
    with topology(Parallel(), CPU, 0, TIMEOUT_SECONDS):
        config = transformer_config(architecture, Parallel(), CPU, torch.float32, {})
        with torch.device("meta"):
            module = GPT(
                config=config,
                transformer_layer_spec=_layers(config),
                vocab_size=architecture.vocab,
                max_sequence_length=architecture.max_positions,
                share_embeddings_and_output_weights=architecture.tied,
                position_embedding_type="rope",
                rotary_base=architecture.rope_theta,
            )
        state: dict[str, Any] = module.sharded_state_dict(prefix="")
    table = rules(architecture)
    held = {global_name(name, 0): value for name, value in state.items() if not isinstance(value, ShardedObject)}
    problems = [*sorted(held.keys() - table.keys()), *sorted(table.keys() - held.keys())]
    if problems:
        raise CheckpointError(f"Megatron-Core's model and the mapping table differ in {', '.join(problems[:5])}")
    parameters = tuple(_stored(rule, tuple(_pieces(held[name])), table) for name, rule in table.items())
    objects = [value.unique_key for value in state.values() if isinstance(value, ShardedObject)]
    return StoredLayout(parameters, (*objects, *filter(None, map(_state_of_norm, parameters))))


def _layers(config: TransformerConfig) -> Any:
    if config.num_moe_experts is None:
        return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")


def _stored(rule: Rule, pieces: tuple[Piece, ...], table: Mapping[str, Rule]) -> StoredParameter:
    """With the key that Transformer Engine's layers have for the norm before experts, which is a module of its own
    there: Megatron-Core's layers name it as if it were part of a linear."""
    router = rule.megatron.replace(NORM, ROUTER)
    if len(pieces) != 1 or not rule.megatron.endswith(NORM) or router not in table:
        return StoredParameter(rule, pieces)
    alias = replace(pieces[0], key=pieces[0].key.replace(FUSED_NORM, NORM))
    return StoredParameter(rule, pieces, alias if alias != pieces[0] else None)


def _state_of_norm(parameter: StoredParameter) -> str | None:
    """The key of the state, without content, of a norm that is a module of its own under Transformer Engine."""
    norm = parameter.boxes[-1]
    if not norm.key.endswith(MODULES_OF_NORMS):
        return None
    key = f"{norm.key.removesuffix('weight')}_extra_state"
    offsets = norm.offsets[: norm.stacked] or (0,)
    return ShardedObject(key, None, norm.whole[: norm.stacked] or (1,), offsets).unique_key  # type: ignore[no-any-return]


def _pieces(value: ShardedTensor | ShardedTensorFactory) -> Iterator[Piece]:
    """Gate and up of an MLP are one parameter and two boxes."""
    built = value.build() if isinstance(value, ShardedTensorFactory) else [value]
    for box in built.values() if isinstance(built, dict) else built:
        stacked = box.prepend_axis_num
        sizes = (1,) * stacked + tuple(box.local_shape)
        yield Piece(box.key, tuple(box.global_offset), sizes, tuple(box.global_shape), stacked)
