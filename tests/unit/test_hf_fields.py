"""config.json in its old and new forms gives the same architecture; mathematics that is not implemented is named."""

from typing import Any

import pytest
import torch
import transformers

from gppo_megatron.config.architecture import Architecture, Experts, RopeScaling, parse_hf_config
from gppo_megatron.errors import ConfigError
from gppo_megatron.policy.megatron.model import stretched

BASE = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5, "max_position_embeddings": 900,
    "sliding_window": None, "tie_word_embeddings": True,
}  # fmt: skip
MOE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "norm_topk_prob": True,
    "mlp_only_layers": [1],
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
          "original_max_position_embeddings": 50}  # fmt: skip
CLASSES = {
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family} | BASE | (MOE if family == "qwen3_moe" else {}) | changes


def parse(config: dict[str, Any]) -> Architecture:
    return parse_hf_config(config, "here")


@pytest.mark.parametrize("family", sorted(CLASSES))
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_old_and_new_forms_are_the_same_model(family: str, scaling: dict[str, Any] | None) -> None:
    """Hand-written as older releases wrote it, and as the installed one writes what it read from that."""
    old = config_of(family, rope_theta=777.0, rope_scaling=scaling)
    new = CLASSES[family](**{key: value for key, value in old.items() if key != "model_type"}).to_dict()
    assert "rope_theta" not in new
    assert "num_experts" not in new
    assert parse(old) == parse(new)
    assert parse(old).rope_theta == 777.0
    assert parse(old).rope_scaling == (RopeScaling(4.0, 1.5, 3.0, 50.0) if scaling else None)
    assert parse(old).experts == (Experts(6, 2, 28, True, frozenset({1})) if family == "qwen3_moe" else None)


@pytest.mark.parametrize("family", sorted(CLASSES))
@pytest.mark.parametrize("key", sorted({*BASE, *MOE} - {"mlp_only_layers"}))
def test_a_missing_field_is_refused_or_means_what_it_means_to_transformers(family: str, key: str) -> None:
    config = config_of(family)
    config.pop(key, None)
    if key not in config_of(family):
        return
    theirs = CLASSES[family](**{name: value for name, value in config.items() if name != "model_type"}).to_dict()
    try:
        ours = parse(config)
    except ConfigError as error:
        assert f"{key} is missing" in str(error)  # noqa: PT017
        return
    assert dataclass_without_positions(ours) == dataclass_without_positions(parse(theirs))


def dataclass_without_positions(architecture: Architecture) -> dict[str, Any]:
    """max_positions bounds lengths and changes no logit."""
    return {name: value for name, value in vars(architecture).items() if name != "max_positions"}


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True}, "sliding-window attention"),
        ("mistral", {"sliding_window": 64}, "sliding-window attention"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling 'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' needs low_freq_factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope parameter 'full_attention'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, "rope_theta is 5.0, but 7.0"),
        ("llama", {"rope_scaling": {"factor": 1.0}, "rope_parameters": {"rope_theta": 7.0}}, "disagree"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("qwen3_moe", {"num_local_experts": 7}, "num_experts is 6, but num_local_experts 7"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts must be an integer >= 1"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, but there are 6"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "the router would have no gradient"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer >= 1"),
        ("qwen3", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized weights ('gptq')"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantized weights ('fp8')"),
        ("gemma", {}, "model_type 'gemma'"),
    ],
)
def test_mathematics_that_is_not_implemented_is_named(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config_of(family, **changes))
    assert named in str(caught.value)


def test_block_scaled_weights_are_no_other_architecture() -> None:
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert parse(config_of("qwen3", quantization_config=scheme)) == parse(config_of("qwen3"))


@pytest.mark.parametrize("scaling", [LLAMA3, LLAMA3 | {"original_max_position_embeddings": 8192, "factor": 32.0}])
def test_stretched_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, rope_parameters={**scaling, "rope_theta": 777.0}
    )
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    plain = 1.0 / 777.0 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    parsed = parse(config.to_dict()).rope_scaling
    assert parsed is not None
    assert torch.equal(stretched(plain, parsed), theirs)
    assert 0 < int((stretched(plain, parsed) == plain).sum()) < 64
