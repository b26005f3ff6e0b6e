"""What a model is, read from its Hugging Face config.json: no architecture flag exists anywhere else. No torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gppo_megatron.config.hf_fields import FAMILIES, LLAMA3_ROPE, experts_of, field_problems, rope_of
from gppo_megatron.config.schema import HfModel, TinyModel
from gppo_megatron.errors import ConfigError

PAD_TOKEN, END_TOKEN = "<pad>", "<end>"
"""The first two tokens of a tiny model's vocabulary; its alphabet follows."""

QK_NORM_FAMILIES = frozenset({"qwen3", "qwen3_moe"})
QKV_BIAS_FAMILIES = frozenset({"qwen2"})


@dataclass(frozen=True)
class Experts:
    """The sparse layers: each token goes to `per_token` of `count` SwiGLU MLPs of width `ffn`.

    normalized: the chosen experts' probabilities are made to add up to 1. dense: numbers of layers with a plain MLP.
    """

    count: int
    per_token: int
    ffn: int
    normalized: bool
    dense: frozenset[int]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary positions beyond `original_positions`: frequencies whose wavelength exceeds
    original_positions / low_factor are divided by `factor`, those below original_positions / high_factor kept."""

    factor: float
    low_factor: float
    high_factor: float
    original_positions: float


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and SwiGLU MLPs.

    ffn: width of the MLP of layers without experts. experts: None for a dense model.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: RopeScaling | None = None
    experts: Experts | None = None

    def experts_in(self, layer: int) -> int:
        """Experts of layer number `layer`, from 0; 0 for a plain MLP."""
        return self.experts.count if self.experts is not None and layer not in self.experts.dense else 0

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding when it is cut in `tensor_parallel` equal shards."""
        return math.ceil(self.vocab / tensor_parallel) * tensor_parallel


def hf_config_of_tiny(model: TinyModel) -> dict[str, Any]:
    """The config.json of a tiny model."""
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    dense = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 2 + len(model.alphabet),
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": model.tied,
        "attention_bias": False,
        "use_cache": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }
    return dense | experts if model.experts else dense


def architecture_of(model: TinyModel | HfModel) -> Architecture:
    """Read the architecture of a model that may not be on disk yet. Raises ConfigError for what is unsupported."""
    match model:
        case TinyModel():
            return parse_hf_config(hf_config_of_tiny(model), "model")
        case HfModel(path=path):
            return read_architecture(Path(path))


def read_architecture(folder: Path) -> Architecture:
    """Read `folder`/config.json. Raises ConfigError."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; model.path must be a Hugging Face model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    return parse_hf_config(config, str(file))


def parse_hf_config(config: Mapping[str, Any], source: str) -> Architecture:
    """The architecture a config.json describes. Raises ConfigError for mathematics that is not implemented."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source}: must hold a JSON object")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{source}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    problems = field_problems(config)
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems))
    rope = rope_of(config)
    heads = int(config["num_attention_heads"])
    return Architecture(
        family=str(family),
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        ffn=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family in QK_NORM_FAMILIES,
        qkv_bias=family in QKV_BIAS_FAMILIES,
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        max_positions=int(config.get("max_position_embeddings") or 32_768),
        rope_scaling=_rope_scaling(rope),
        experts=_experts(config) if family == "qwen3_moe" else None,
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return None
    return RopeScaling(*(float(rope[key]) for key in LLAMA3_ROPE))


def _experts(config: Mapping[str, Any]) -> Experts:
    """Every `decoder_sparse_step`-th layer has experts, but for the `mlp_only_layers`."""
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
    return Experts(
        count=int(experts_of(config)),
        per_token=int(config["num_experts_per_tok"]),
        ffn=int(config["moe_intermediate_size"]),
        normalized=bool(config["norm_topk_prob"]),
        dense=frozenset(
            layer for layer in range(int(config["num_hidden_layers"])) if layer in dense or (layer + 1) % step
        ),
    )
