"""Megatron-Core's GPTModel for a Hugging Face architecture, wrapped for data-parallel training."""

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.schema import Parallel
from gppo_megatron.errors import ConfigError
from gppo_megatron.policy.megatron.gpt import GPT
from gppo_megatron.policy.megatron.mapping.table import global_name

HAVE_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None

FIXED: dict[str, Any] = {
    **dict.fromkeys(("context_parallel_size", "expert_model_parallel_size"), 1),
    **dict.fromkeys(("sequence_parallel", "fp16", "multi_latent_attention", "rotary_interleaved"), False),
    **dict.fromkeys(("layernorm_zero_centered_gamma", "attention_output_gate"), False),
    "defer_embedding_wgrad_compute": False,
    **dict.fromkeys(("num_moe_experts", "mtp_num_layers", "window_size", "softmax_scale")),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size")),
}
"""The mapping table, the forward pass and the process groups are right for these values alone."""


class NamedParameter(NamedTuple):
    """A parameter of this rank under the mapping table's name."""

    name: str
    parameter: torch.nn.Parameter


def transformer_config(
    architecture: Architecture,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    extra: Mapping[str, Any],
) -> TransformerConfig:
    """Megatron's configuration: the model's own numbers, the layout, and `extra` fields from the run's `megatron:`.

    Raises ConfigError for an unknown extra field, one this project sets itself, or a value Megatron refuses.
    """
    a, on_cpu = architecture, device.type == "cpu"
    ours: dict[str, Any] = {
        "num_layers": a.layers,
        "hidden_size": a.hidden,
        "num_attention_heads": a.heads,
        "num_query_groups": a.kv_heads,
        "kv_channels": a.head_dim,
        "ffn_hidden_size": a.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": a.norm_eps,
        "qk_layernorm": a.qk_norm,
        "add_qkv_bias": a.qkv_bias,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "variable_seq_lengths": parallel.pipeline > 1,
        "moe_token_dispatcher_type": "alltoall",  # Megatron asks for it wherever sequence lengths vary
        "use_cpu_initialization": on_cpu,
        # Also marks which parameters are sharded: without it the gradient norm under tensor parallelism is wrong.
        "perform_initialization": True,
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": sum_gradients,
    }
    ours |= FIXED
    if on_cpu:
        fusions = ("bias_activation", "bias_dropout", "masked_softmax", "gradient_accumulation")
        ours |= {f"{fusion}_fusion": False for fusion in fusions}
        ours |= {"apply_rope_fusion": False, "persist_layer_norm": False}
    _check_extra(extra, ours)
    try:
        return TransformerConfig(**ours, **extra)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"Megatron-Core refuses this configuration: {error}") from error


def _check_extra(extra: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    problems = [f"megatron.{key}: no such field of TransformerConfig" for key in extra if key not in known]
    problems += [f"megatron.{key}: set by the run itself, not here" for key in extra if key in ours]
    if problems:
        raise ConfigError("\n".join(problems))


def sum_gradients(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Collective: add gradients up over data-parallel ranks and tied embeddings, dividing by nothing.

    Every denominator is already in the loss (`objective.reduce`), so the token count Megatron passes is dropped.
    """
    finalize_model_grads(model, None, **options)


def build_model(
    config: TransformerConfig, architecture: Architecture, device: torch.device
) -> list[DistributedDataParallel]:
    """Collective: this rank's part of the model, its parameters NaN until `weights.load` fills them."""
    if HAVE_TRANSFORMER_ENGINE and device.type == "cuda":
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=architecture.qk_norm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=architecture.qk_norm, normalization="RMSNorm")
    module = GPT(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=architecture.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
    ).to(device, config.params_dtype)  # torch's own norms would stay in float32
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return [DistributedDataParallel(config, ddp_config, module)]


def named_parameters(model: list[DistributedDataParallel]) -> Iterator[NamedParameter]:
    """This rank's parameters under the mapping table's names."""
    for chunk in model:
        layers = chunk.module.decoder.layers
        first_layer = layers[0].layer_number - 1 if len(layers) else 0
        for name, parameter in chunk.module.named_parameters():
            yield NamedParameter(global_name(name, first_layer), parameter)
