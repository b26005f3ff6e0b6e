"""What the layers are made of."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from gppo_megatron.policy.megatron.attention import SequenceAttention


class RmsNorm(torch.nn.RMSNorm):
    """RMSNorm that also works under sequence parallelism, which Megatron's own wrapper of torch's norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Each process sees its part of the sequence alone: Megatron adds the gradients of marked parameters up.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def local_block(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one part of the model, sparse and dense, in torch and Megatron-Core alone."""
    block = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm", vp_stage=virtual_stage)
    block.layer_norm = RmsNorm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = RmsNorm
        if parts.pre_mlp_layernorm is not IdentityOp:
            parts.pre_mlp_layernorm = RmsNorm
        parts.sharded_state_dict_keys_map = _stored_names(parts)
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
        attention.core_attention = SequenceAttention
    return block


def _stored_names(parts: Any) -> dict[str, str]:
    """Under which names the layer's norms are stored: those of Transformer Engine, where the norm before a plain MLP is
    part of a linear, and the norm before experts a module of its own."""
    names: dict[str, str] = parts.sharded_state_dict_keys_map
    sparse = MoELayer in (getattr(parts.mlp, "module", None), getattr(parts.mlp, "func", None))  # a partial since 0.19
    return {ours: stored for ours, stored in names.items() if not (sparse and ours == "pre_mlp_layernorm.")}


def engine_block(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The same layers in Transformer Engine."""
    return get_gpt_decoder_block_spec(config, True, normalization="RMSNorm", vp_stage=virtual_stage)
