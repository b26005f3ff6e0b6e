"""What a model is, read from its Hugging Face config.json: no architecture flag exists anywhere else. No torch."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gppo_megatron.config.schema import HfModel, TinyModel
from gppo_megatron.errors import ConfigError

PAD_TOKEN, END_TOKEN = "<pad>", "<end>"
"""The first two tokens of a tiny model's vocabulary; its alphabet follows."""

QK_NORM_FAMILIES = frozenset({"qwen3"})
QKV_BIAS_FAMILIES = frozenset({"qwen2"})
FAMILIES = ("qwen3", "qwen2", "llama", "mistral")


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and a SwiGLU MLP."""

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

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding when it is cut in `tensor_parallel` equal shards."""
        return math.ceil(self.vocab / tensor_parallel) * tensor_parallel


def hf_config_of_tiny(model: TinyModel) -> dict[str, Any]:
    """The config.json of a tiny model."""
    return {
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
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    problems = [*_wrong_numbers(config)]
    problems += _unsupported(config, rope) if isinstance(rope, Mapping) else [f"rope scaling {rope!r} is not supported"]
    if problems:
        raise ConfigError(f"{source}: " + "; ".join(problems))
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
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        max_positions=int(config.get("max_position_embeddings") or 32_768),
    )


def _wrong_numbers(config: Mapping[str, Any]) -> Iterator[str]:
    """Fields that must be there, or may be left out or null, and are no number above 0."""
    counts = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for key in (*counts, "rms_norm_eps"):
        if key not in config:
            yield f"{key} is missing"
    for key in (*counts, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        value: Any = config.get(key)
        if value is None and key not in counts:
            continue
        if key in config and (type(value) is not int or value < 1):
            yield f"{key} must be an integer >= 1 (got {value!r})"
    for key in ("rms_norm_eps", "rope_theta"):
        value = config.get(key)
        if value is None and key == "rope_theta":
            continue
        if key in config and (type(value) not in (int, float) or not value > 0):
            yield f"{key} must be a number > 0 (got {value!r})"


def _unsupported(config: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    """Fields whose value changes the mathematics in a way this project does not implement."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    checks = {
        f"rope scaling {kind!r} is not supported": kind != "default",
        f"hidden_act {config.get('hidden_act')!r} is not supported (silu is)": config.get("hidden_act", "silu")
        != "silu",
        "attention_bias is not supported": bool(config.get("attention_bias")),
        "mlp_bias is not supported": bool(config.get("mlp_bias")),
        "sliding-window attention is not supported": bool(config.get("sliding_window"))
        and config.get("use_sliding_window", True),
        "quantized weights are not supported": "quantization_config" in config,
    }
    return [message for message, found in checks.items() if found]
