"""Megatron-Core's GPTModel for a Hugging Face architecture, wrapped for data-parallel training."""

import dataclasses
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer import TransformerConfig

from gppo_megatron.config.architecture import Architecture, RopeScaling
from gppo_megatron.config.schema import Fp8, Memory, Parallel
from gppo_megatron.errors import ConfigError
from gppo_megatron.policy.megatron import experts
from gppo_megatron.policy.megatron.experts import expert_fields, replay_fields
from gppo_megatron.policy.megatron.gpt import GPT
from gppo_megatron.policy.megatron.layers import engine_block, local_block
from gppo_megatron.policy.megatron.mapping.table import global_name
from gppo_megatron.policy.megatron.precision import fp8_fields, reduction_fields

HAVE_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None

FIXED: dict[str, Any] = {
    **dict.fromkeys(("fp16", "multi_latent_attention", "rotary_interleaved"), False),
    **dict.fromkeys(("layernorm_zero_centered_gamma", "attention_output_gate"), False),
    "defer_embedding_wgrad_compute": False,
    # An output freed while gloo still sends it gives wrong gradients, other ones in every run (Megatron-Core 0.16.1).
    "deallocate_pipeline_outputs": False,
    # Megatron's fused cross entropy rounds its gradient to bfloat16; the head here has its own.
    "cross_entropy_loss_fusion": False,
    **dict.fromkeys(("mtp_num_layers", "window_size", "softmax_scale")),
}
"""The mapping table, the forward pass and the process groups are right for these values alone."""

FIELDS = frozenset(field.name for field in dataclasses.fields(TransformerConfig))


class NamedParameter(NamedTuple):
    """A parameter of this rank under the mapping table's name."""

    name: str
    parameter: Any


def transformer_config(
    architecture: Architecture,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    extra: Mapping[str, Any],
    memory: Memory = Memory(),  # noqa: B008 - frozen
    replay: bool = False,
    fp8: Fp8 | None = None,
) -> TransformerConfig:
    """Megatron's configuration: the model's own numbers, the layout, and `extra` fields from the run's `megatron:`.

    replay: whether the routers can be told where tokens go. fp8: of the layers' products.
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
        "moe_token_dispatcher_type": "alltoall",  # Megatron asks for it wherever sequence lengths vary
        "use_cpu_initialization": on_cpu,
        # Also marks which parameters are sharded: without it the gradient norm under tensor parallelism is wrong.
        "perform_initialization": True,
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": sum_gradients,
    }
    ours |= FIXED | _layout_fields(parallel) | _recompute_fields(memory)
    ours |= {field: value for field, value in experts.FIXED.items() if field in FIELDS}
    ours |= expert_fields(a.experts, a.layers, grouped=HAVE_TRANSFORMER_ENGINE and not on_cpu)
    ours |= replay_fields(replay)
    ours |= {key: value for key, value in fp8_fields(fp8, a.experts is not None).items() if key in FIELDS}
    if on_cpu:
        fusions = ("bias_activation", "bias_dropout", "masked_softmax", "gradient_accumulation")
        ours |= {f"{fusion}_fusion": False for fusion in fusions}
        ours |= {"apply_rope_fusion": False, "persist_layer_norm": False}
    _check_extra(extra, ours)
    try:
        return TransformerConfig(**ours, **extra)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"Megatron-Core refuses this configuration: {error}") from error


def _layout_fields(parallel: Parallel) -> dict[str, Any]:
    interleaved = parallel.virtual_stages > 1
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_stages if interleaved else None,
        # Two neighbours of an interleaved pipeline exchange two messages at once. Batched, these are taken for one
        # another, and so are the shapes that precede them where lengths vary: wrong gradients and no error.
        "variable_seq_lengths": parallel.pipeline > 1 and not interleaved,
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
    }


def _recompute_fields(memory: Memory) -> dict[str, Any]:
    match memory.recompute:
        case "none":
            return dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": list(memory.recompute_modules)}
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": memory.recompute_layers,
            }


def _check_extra(extra: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    problems = [f"megatron.{key}: no such field of TransformerConfig" for key in extra if key not in FIELDS]
    problems += [f"megatron.{key}: set by the run itself, not here" for key in extra if key in ours]
    if problems:
        raise ConfigError("\n".join(problems))


def sum_gradients(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Collective: add gradients up over data-parallel ranks and tied embeddings, dividing by nothing.

    Every denominator is already in the loss (`objective.reduce`), so the token count Megatron passes is dropped.
    """
    finalize_model_grads(model, None, **options)


def build_model(
    config: TransformerConfig,
    architecture: Architecture,
    device: torch.device,
    parallel: Parallel = Parallel(),  # noqa: B008 - frozen
    memory: Memory = Memory(),  # noqa: B008 - frozen
    frozen: bool = False,
) -> list[DistributedDataParallel]:
    """Collective: this rank's parts of the model, one a virtual stage, their parameters NaN until `weights.load`
    fills them. parallel, memory: as `config` was made of. frozen: never trained, and without memory for gradients."""
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=memory.distributed_optimizer and not frozen,
        overlap_grad_reduce=parallel.overlap_gradients and not frozen,
        overlap_param_gather=parallel.overlap_parameters and not frozen,
        **reduction_fields(config),
    )
    stages: list[int | None] = list(range(parallel.virtual_stages)) if parallel.virtual_stages > 1 else [None]
    chunks = [
        # Gradients of later parts are reduced while earlier parts still compute: one bucket each is enough.
        DistributedDataParallel(
            config,
            reduction,
            _module(config, architecture, device, stage).requires_grad_(not frozen),
            disable_bucketing=bool(stage),
        )
        for stage in stages
    ]
    if parallel.overlap_gradients and not frozen:
        holds = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = holds if len(holds) > 1 else holds[0]
    return chunks


def _module(
    config: TransformerConfig, architecture: Architecture, device: torch.device, stage: int | None
) -> torch.nn.Module:
    layers = engine_block if HAVE_TRANSFORMER_ENGINE and device.type == "cuda" else local_block
    module: torch.nn.Module = GPT(
        config=config,
        transformer_layer_spec=layers(config, stage),
        vocab_size=architecture.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        vp_stage=stage,
    ).to(device, config.params_dtype)  # torch's own norms would stay in float32
    rotary: Any = getattr(module, "rotary_pos_emb", None)
    if architecture.rope_scaling is not None and rotary is not None:
        rotary.inv_freq = stretched(rotary.inv_freq, architecture.rope_scaling)
    with torch.no_grad():
        for parameter in module.parameters():
            if not is_float8tensor(parameter):  # FP8's scales would have to be taken from NaN
                parameter.fill_(torch.nan)
    return module


def stretched(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3's rotary frequencies for longer sequences than the model was first trained on.

    Megatron-Core has the formula, but takes all numbers except `factor` from the first models that used it.
    """
    wavelengths = 2 * math.pi / frequencies
    share = (scaling.original_positions / wavelengths - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    longest = scaling.original_positions / scaling.low_factor
    shortest = scaling.original_positions / scaling.high_factor
    divided = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    between = (1 - share) * divided / scaling.factor + share * divided
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, divided)


def named_parameters(model: list[DistributedDataParallel]) -> Iterator[NamedParameter]:
    """This rank's parameters under the mapping table's names."""
    for chunk in model:
        yield from _named(chunk, chunk.module.named_parameters())


def named_buffers(model: list[DistributedDataParallel]) -> Iterator[NamedParameter]:
    """This rank's buffers that a checkpoint would hold, under names of the same kind."""
    for chunk in model:
        saved = chunk.module.state_dict()
        yield from _named(chunk, ((name, each) for name, each in chunk.module.named_buffers() if name in saved))


def _named(chunk: DistributedDataParallel, tensors: Iterable[tuple[str, Any]]) -> Iterator[NamedParameter]:
    layers, config = chunk.module.decoder.layers, chunk.config
    first_layer = layers[0].layer_number - 1 if len(layers) else 0
    experts_here = (config.num_moe_experts or 0) // config.expert_model_parallel_size
    first_expert = experts_here * parallel_state.get_expert_model_parallel_rank()
    for name, tensor in tensors:
        yield NamedParameter(global_name(name, first_layer, first_expert), tensor)
