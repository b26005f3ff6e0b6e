"""Tiny models to convert, and the question whether two Hugging Face folders are the same."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints_tools.convert import Options, hf_to_megatron, megatron_to_hf
from gppo_megatron.policy.megatron.hf_folder import HfReader

FAMILIES = {
    "qwen3": transformers.Qwen3Config,
    "qwen2": transformers.Qwen2Config,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "mlp_only_layers": [1]}
GATE = "model.layers.1.mlp.gate_proj.weight"
SIDE_FILES = {"tokenizer.json": '{"a":  1}', "chat_template.jinja": "{{ messages }}\n", "merges.txt": "#version\na b"}


def hf_folder(
    folder: Path,
    family: str = "qwen3",
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    layers: int = 2,
    kv_heads: int = 4,
) -> Path:
    """A model whose dimensions all differ, with random weights, norms and biases too, and side files.

    Torch rounds a SiLU by its place in a row that does not fill its vectors: 64 of them keep logits comparable bit for
    bit.
    """
    config = FAMILIES[family](
        vocab_size=37, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=10, tie_word_embeddings=tied, sliding_window=None,
        **(SPARSE if family == "qwen3_moe" else {}),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.3, generator=generator))
    model.to(dtype).save_pretrained(folder)
    for name, text in SIDE_FILES.items():
        (folder / name).write_text(text)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    reader = HfReader(folder)
    return {name: reader.read(name) for name in reader.names}


def assert_same(first: Path, second: Path) -> None:
    """Bit for bit, and dtype for dtype; the side files byte for byte."""
    a, b = tensors_of(first), tensors_of(second)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), b[name].view(torch.uint8)), name
    for name in ("config.json", "generation_config.json", *SIDE_FILES):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace a tensor of a folder of one file; None takes it away."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save(file, tensors)


def save(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, file, metadata={"format": "pt"})


def split_in_two(folder: Path) -> None:
    """The same weights in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save(folder / file, {name: tensors[name] for name in held})
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def silent(_: str) -> None:
    pass


def to_megatron(source: Path, target: Path, **options: Any) -> Path:
    hf_to_megatron(source, target, Options(**options), silent)
    return target


def to_hf(source: Path, target: Path, **options: Any) -> Path:
    megatron_to_hf(source, target, Options(**options), silent)
    return target
