"""Which fields of a Hugging Face config.json this project can follow; every other that changes the mathematics is
refused by name. No torch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

FAMILIES = ("qwen3", "qwen3_moe", "qwen2", "llama", "mistral")

COUNTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim", "max_position_embeddings")
EXPERT_COUNTS = ("num_experts_per_tok", "moe_intermediate_size")

REQUIRED: dict[str, tuple[str, ...]] = {
    "qwen3": ("num_key_value_heads", "head_dim"),
    "qwen3_moe": ("num_key_value_heads", *EXPERT_COUNTS, "norm_topk_prob"),
    "qwen2": ("num_key_value_heads",),
    "llama": (),
    "mistral": ("num_key_value_heads", "sliding_window"),
}
"""Fields that transformers would fill with a number of one certain model: without them a folder is not understood."""

PLAIN_ROPE = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _absent(value: Any) -> bool:
    return value in (None, False, 0, [], {})


def _neutral(value: Any) -> bool:
    return value in (None, 1)


HARMLESS: dict[str, Callable[[Any], bool]] = {
    "hidden_act": lambda value: value in (None, "silu"),
    "layer_types": lambda value: value is None or all(layer == "full_attention" for layer in value),
    "partial_rotary_factor": _neutral,
    "scoring_func": lambda value: value in (None, "softmax"),
    **dict.fromkeys(
        (
            *("attention_bias", "mlp_bias", "use_bias", "lm_head_bias", "no_rope_layers", "alibi", "rope_interleaved"),
            *("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "query_pre_attn_scalar"),
            *("qk_layernorm", "use_qk_norm", "attn_output_gate", "sliding_window_pattern", "attention_chunk_size"),
            *("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace"),
            *("num_nextn_predict_layers", "mtp_num_hidden_layers", "kv_lora_rank", "q_lora_rank"),
        ),
        _absent,
    ),
    **dict.fromkeys(
        (
            *("residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling", "logit_scale"),
            *("routed_scaling_factor", "n_group", "topk_group"),
        ),
        _neutral,
    ),
}
"""For each field that would change the mathematics, the values that leave it as it is here."""


def rope_of(config: Mapping[str, Any]) -> Any:
    """The rotary parameters, under their new name or their old one."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def experts_of(config: Mapping[str, Any]) -> Any:
    """The number of experts, under its old name or its new one."""
    return config.get("num_experts", config.get("num_local_experts"))


def field_problems(config: Mapping[str, Any]) -> list[str]:
    """Everything in a config.json of a known family that cannot be followed, one clause each."""
    problems = [*_wrong_numbers(config), *_rope_problems(config), *_unsupported(config), *_quantization(config)]
    return problems + ([*_expert_problems(config)] if config["model_type"] == "qwen3_moe" else [])


def _wrong_numbers(config: Mapping[str, Any]) -> Iterator[str]:
    """Fields that must be there, or may be left out or null, and are no number above 0."""
    for key in (*COUNTS, "rms_norm_eps", *REQUIRED[config["model_type"]]):
        if key not in config:
            yield f"{key} is missing"
    for key in (*COUNTS, *OPTIONAL_COUNTS):
        value: Any = config.get(key)
        if value is None and key not in COUNTS:
            continue
        if key in config and not _is_count(value):
            yield f"{key} must be an integer >= 1 (got {value!r})"
    for key in ("rms_norm_eps", "rope_theta"):
        value = config.get(key)
        if value is None and key == "rope_theta":
            continue
        if key in config and not _is_positive(value):
            yield f"{key} must be a number > 0 (got {value!r})"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _rope_problems(config: Mapping[str, Any]) -> Iterator[str]:
    rope = rope_of(config)
    if not isinstance(rope, Mapping):
        yield f"rope scaling {rope!r} is not supported"
        return
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        yield "rope_scaling and rope_parameters disagree"
    theta, other = rope.get("rope_theta"), config.get("rope_theta")
    if theta is not None and not _is_positive(theta):
        yield f"rope_theta must be a number > 0 (got {theta!r})"
    elif None not in (theta, other) and theta != other:
        yield f"rope_theta is {other!r}, but {theta!r} among the rope parameters"
    yield from _rope_kind_problems(rope)


def _rope_kind_problems(rope: Mapping[str, Any]) -> Iterator[str]:
    if rope.get("partial_rotary_factor") not in (None, 1):
        yield "partial_rotary_factor is not supported"
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = PLAIN_ROPE.union(LLAMA3_ROPE if kind == "llama3" else ())
    if kind in ("default", "llama3"):
        yield from (f"rope parameter {key!r} is not supported" for key in rope if key not in known)
    if kind == "llama3":
        for key in LLAMA3_ROPE:
            if not _is_positive(rope.get(key)):
                yield f"rope scaling 'llama3' needs {key}, a number > 0 (got {rope.get(key)!r})"
    elif kind != "default":
        yield f"rope scaling {kind!r} is not supported"


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Fields whose value changes the mathematics in a way this project does not implement."""
    for key, harmless in HARMLESS.items():
        if not harmless(config.get(key)):
            yield f"{key} {config[key]!r} is not supported"
    windows = config["model_type"] in ("mistral", "llama") or config.get("use_sliding_window", True)
    if config.get("sliding_window") and windows:
        yield "sliding-window attention is not supported"


def _quantization(config: Mapping[str, Any]) -> Iterator[str]:
    """Block-scaled FP8 is read; the arithmetic of any other scheme is unknown here."""
    scheme = config.get("quantization_config")
    if scheme is None:
        return
    known = isinstance(scheme, Mapping) and scheme.get("quant_method") == "fp8"
    if not known or scheme.get("fmt", "e4m3") != "e4m3" or not _is_block(scheme.get("weight_block_size")):
        method = scheme.get("quant_method") if isinstance(scheme, Mapping) else scheme
        yield (
            f"quantized weights ({method!r}) are not supported, but for quant_method 'fp8' with fmt 'e4m3' and a "
            "weight_block_size of two numbers"
        )


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_count(size) for size in value)


def _expert_problems(config: Mapping[str, Any]) -> Iterator[str]:
    count = experts_of(config)
    if count is None:
        yield "num_experts is missing"
    elif not _is_count(count):
        yield f"num_experts must be an integer >= 1 (got {count!r})"
    if config.get("num_local_experts", count) != count:
        yield f"num_experts is {count!r}, but num_local_experts {config['num_local_experts']!r}"
    for key in EXPERT_COUNTS:
        if key in config and not _is_count(config[key]):
            yield f"{key} must be an integer >= 1 (got {config[key]!r})"
    if not _is_count(config.get("decoder_sparse_step", 1)):
        yield f"decoder_sparse_step must be an integer >= 1 (got {config['decoder_sparse_step']!r})"
    chosen = config.get("num_experts_per_tok")
    if _is_count(count) and _is_count(chosen) and chosen > count:
        yield f"num_experts_per_tok is {chosen}, but there are {count} experts"
    if chosen == 1 and config.get("norm_topk_prob"):
        yield "num_experts_per_tok 1 with norm_topk_prob is not supported: the router would have no gradient"
