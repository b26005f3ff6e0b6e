"""Mixtures of experts in Megatron-Core's own words."""

from typing import Any

from gppo_megatron.config.architecture import Experts

FIXED: dict[str, Any] = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_score_function": "softmax",
    **dict.fromkeys(("moe_z_loss_coeff", "moe_input_jitter_eps", "moe_expert_capacity_factor")),
    **dict.fromkeys(("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk")),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size")),
    **dict.fromkeys(("moe_router_enable_expert_bias", "moe_apply_probs_on_input", "moe_token_dropping"), False),
    **dict.fromkeys(("moe_router_force_load_balancing", "moe_use_legacy_grouped_gemm"), False),
}
"""What the mapping table and the loss know nothing of. An auxiliary loss would be scaled by Megatron's token count,
which no denominator of this project's loss contains."""


def replay_fields(replay: bool) -> dict[str, Any]:
    """Fields with which a router can be told where tokens go; its fused kernel would not listen."""
    return {"moe_enable_routing_replay": True, "moe_router_fusion": False} if replay else {}


def expert_fields(experts: Experts | None, layers: int, grouped: bool) -> dict[str, Any]:
    """Fields of TransformerConfig. grouped: all experts of a rank in one matrix product, which needs Transformer
    Engine; else one after the other."""
    if experts is None:
        return {"num_moe_experts": None}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [0 if layer in experts.dense else 1 for layer in range(layers)],
        # The softmax over the chosen experts alone is that over all of them made to add up to 1.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": grouped,
    }
