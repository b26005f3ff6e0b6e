"""`precision:` and `optimizer.state:` in Megatron-Core's own fields, and what a device can compute.

Verified on a CPU as far as Megatron's configuration objects go; FP8 and narrow optimizer state have not run on a GPU.
"""

import inspect
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.transformer import TransformerConfig

from gppo_megatron.config.numbers import WIDTHS, Fp8, OptimizerState, Precision, Recipe
from gppo_megatron.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STATE_DTYPES = DTYPES | {"float16": torch.float16, "fp8": torch.uint8}

CAPABILITY: dict[Recipe, tuple[int, int]] = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""recipe -> the first compute capability of a GPU that has it."""

BFLOAT16_CAPABILITY = (8, 0)


def check_device(precision: Precision, device: torch.device, transformer_engine: bool) -> None:
    """Raises ConfigError where `device` cannot compute in these numbers.

    transformer_engine: whether it is installed.
    """
    fp8 = precision.fp8
    if device.type != "cuda":
        if fp8 is not None:
            raise ConfigError(f"precision.fp8: needs Transformer Engine on a GPU (got device: {device.type}); use null")
        return
    if fp8 is not None and not transformer_engine:
        raise ConfigError("precision.fp8: needs Transformer Engine, which is not installed; install it, or use null")
    found = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    if precision.dtype == "bfloat16" and found < BFLOAT16_CAPABILITY:
        raise ConfigError(
            f"precision.dtype: bfloat16 needs a GPU of compute capability {_version(BFLOAT16_CAPABILITY)}, but this "
            f"one, {name}, has {_version(found)}; use float32"
        )
    if fp8 is not None and found < CAPABILITY[fp8.recipe]:
        able = [recipe for recipe, needed in CAPABILITY.items() if found >= needed]
        raise ConfigError(
            f"precision.fp8.recipe: {fp8.recipe} needs a GPU of compute capability "
            f"{_version(CAPABILITY[fp8.recipe])}, but this one, {name}, has {_version(found)}; "
            + (f"{' or '.join(able)} would do" if able else "it has no FP8: precision.fp8: null would do")
        )
    if fp8 is not None and fp8.recipe == "delayed" and not delayed_scaling_works():
        raise ConfigError(
            "precision.fp8.recipe: delayed does not work with this Transformer Engine, whose recipe does not take what "
            "Megatron-Core passes (override_linear_precision); tensorwise would do, or an older Transformer Engine"
        )


def delayed_scaling_works() -> bool:
    """Whether Transformer Engine's class of this recipe takes all that Megatron-Core's passes to it: since a release
    that dropped an argument (2.20.2 is without it), constructing one is a TypeError in the first forward pass."""
    ours = getattr(fp8_utils, "TEDelayedScaling", None)
    return ours is not None and "override_linear_precision" in inspect.signature(ours.__bases__[0]).parameters


def fp8_fields(fp8: Fp8 | None, experts: bool) -> dict[str, Any]:
    """Fields of TransformerConfig. experts: whether the model has any; each one's tokens are then padded to a width
    that FP8 takes."""
    never = {"fp4": None, "fp8_dot_product_attention": False, "fp8_multi_head_attention": False}
    never |= {"fp8_output_proj": False, "fp8_quantizer_factory": None}
    if fp8 is None:
        return never | {"fp8": None, "fp8_param": False, "first_last_layers_bf16": False}
    spared = fp8.first_layers + fp8.last_layers > 0
    return never | {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.parameters,
        "first_last_layers_bf16": spared,
        "num_layers_at_start_in_bf16": fp8.first_layers,
        "num_layers_at_end_in_bf16": fp8.last_layers,
        **({"moe_router_padding_for_quantization": True} if experts else {}),
    }


def reduction_fields(config: TransformerConfig) -> dict[str, Any]:
    """Fields of DistributedDataParallelConfig: FP8 weights are gathered as such. The buffer in which mxfp8's, of which
    there are two copies, arrive is that of the gradients."""
    return {
        "fp8_param_gather": config.fp8_param,
        "reuse_grad_buf_for_mxfp8_param_ag": config.fp8_param and config.fp8_recipe == "mxfp8",
    }


def optimizer_fields(config: TransformerConfig, state: OptimizerState) -> dict[str, Any]:
    """Fields of OptimizerConfig."""
    fields: dict[str, Any] = {
        "bf16": config.params_dtype == torch.bfloat16,
        "params_dtype": config.params_dtype,
        "fp8_recipe": config.fp8_recipe if config.fp8 else None,
        "reuse_grad_buf_for_mxfp8_param_ag": reduction_fields(config)["reuse_grad_buf_for_mxfp8_param_ag"],
    }
    if state.plain:
        return fields
    return fields | {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": STATE_DTYPES[state.mean],
        "exp_avg_sq_dtype": STATE_DTYPES[state.square],
        "main_params_dtype": STATE_DTYPES[state.weights],
    }


def token_multiple(config: TransformerConfig) -> int:
    """Tokens of a micro-batch on each process are a multiple of it."""
    return WIDTHS[config.fp8_recipe] if config.fp8 else 1


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
