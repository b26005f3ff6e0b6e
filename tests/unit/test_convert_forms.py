"""Hugging Face folders in other forms than the plain one: FP8 with a scale a block, and experts fused over a layer."""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints_tools.verify import compare_folders
from gppo_megatron.checkpoint.metadata import read_contents
from gppo_megatron.errors import CheckpointError, ConfigError
from tests.unit.conversion import GATE, assert_same, hf_folder, save, silent, tensors_of, to_hf, to_megatron
from tests.unit.test_block_scaled import BLOCK, SCHEME, declare, fused, scaled


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """Experts too; what is not quantized is bfloat16."""
    folder = hf_folder(tmp_path / "hf", "qwen3_moe")
    weights = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(folder).items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = scaled(tensors[name].float())
    save(weights, tensors)
    declare(folder, SCHEME)
    return folder


def number_by_number(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    found = [
        [float(weight[row, column]) * float(scales[row // BLOCK[0], column // BLOCK[1]]) for column in range(columns)]
        for row in range(rows)
    ]
    return torch.tensor(found, dtype=torch.float64).float()


def test_fp8_weights_are_written_as_the_numbers_they_stand_for(quantized: Path, tmp_path: Path) -> None:
    between = to_megatron(quantized, tmp_path / "megatron")
    assert read_contents(between).tensors["decoder.final_layernorm.weight"].dtype == "bfloat16"
    held, back = load_file(quantized / "model.safetensors"), tensors_of(to_hf(between, tmp_path / "back"))
    assert back.keys() == {name for name in held if not name.endswith("_scale_inv")}
    for name, tensor in back.items():
        plain = held[name]
        expected = number_by_number(plain, held[f"{name}_scale_inv"]) if name.endswith("_proj.weight") else plain
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    for config in (between / "hf" / "config.json", tmp_path / "back" / "config.json"):
        said = json.loads(config.read_text())
        assert "quantization_config" not in said
        assert said["dtype"] == "float32"  # else transformers would round what was exact
    narrow = tensors_of(to_hf(to_megatron(quantized, tmp_path / "narrow", dtype=torch.bfloat16), tmp_path / "b16"))
    assert all(torch.equal(tensor, back[name].bfloat16()) for name, tensor in narrow.items())


def test_verify_compares_fp8_weights_by_their_numbers(quantized: Path, tmp_path: Path) -> None:
    between = to_megatron(quantized, tmp_path / "megatron")
    assert compare_folders(quantized, between, 0, silent)
    with pytest.raises(CheckpointError, match=r"hf: logits of quantized weights are not computed"):
        compare_folders(quantized, between, 4, silent)


def test_fp8_of_an_unknown_scheme_is_refused_by_name_before_anything_is_written(
    quantized: Path, tmp_path: Path
) -> None:
    declare(quantized, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"quantized weights \('gptq'\) are not supported"):
        to_megatron(quantized, tmp_path / "megatron", dry=True)
    declare(quantized, None)
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj\.weight holds float8.* and 28 more$"):
        to_megatron(quantized, tmp_path / "megatron", dry=True)
    declare(quantized, SCHEME)
    tensors = load_file(quantized / "model.safetensors")
    tensors[f"{GATE}_scale_inv"] = torch.ones(5, 5)
    save(quantized / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=rf"{GATE}_scale_inv has the shape \[5, 5\]") as caught:
        to_megatron(quantized, tmp_path / "megatron", dry=True)
    assert "\n" not in str(caught.value)
    del tensors[f"{GATE}_scale_inv"]
    save(quantized / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=rf"{GATE} holds float8_e4m3fn of a scheme that is not known"):
        to_megatron(quantized, tmp_path / "megatron", dry=True)
    assert not (tmp_path / "megatron").exists()


def test_fused_experts_give_the_same_checkpoint(tmp_path: Path) -> None:
    plain = hf_folder(tmp_path / "plain", "qwen3_moe")
    tensors = tensors_of(plain)
    save(plain / "model.safetensors", tensors)
    expected = to_megatron(plain, tmp_path / "expected")
    other = hf_folder(tmp_path / "fused", "qwen3_moe")
    save(other / "model.safetensors", fused(tensors, layers=(0,), experts=6))
    assert not any(".experts.0." in name for name in load_file(other / "model.safetensors"))
    between = to_megatron(other, tmp_path / "megatron")
    names = sorted(file.name for file in expected.glob("*.distcp"))
    assert names
    for name in names:
        assert (between / name).read_bytes() == (expected / name).read_bytes()
    assert_same(plain, to_hf(between, tmp_path / "back"))
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == tensors.keys()
    assert compare_folders(other, between, 6, silent)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gate_up_proj", (5, 56, 32), r"missing: .*experts\.5\.gate_proj"),
        ("gate_up_proj", (6, 58, 32), r"of another shape: .*experts\.0\.gate_proj\.weight \[29, 32\]"),
        ("down_proj", (6, 32 * 28), r"not part of this model: .*experts\.down_proj"),
    ],
)
def test_fused_experts_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    folder = hf_folder(tmp_path / "hf", "qwen3_moe")
    tensors = fused(tensors_of(folder), layers=(0,), experts=6)
    tensors[f"model.layers.0.mlp.experts.{name}"] = torch.ones(shape)
    save(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=message):
        to_megatron(folder, tmp_path / "megatron", dry=True)


NORM, FUSED_NORM = "decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"


def without(folder: Path, key: str) -> None:
    (folder / "manifest.json").unlink(missing_ok=True)
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    del metadata.state_dict_metadata[key]
    file.write_bytes(pickle.dumps(metadata))


def test_the_norm_before_experts_is_read_under_either_of_its_keys(tmp_path: Path) -> None:
    """Megatron-Core's layers and those of Transformer Engine name it differently; a conversion writes both."""
    hf = hf_folder(tmp_path / "hf", "qwen3_moe")
    between = to_megatron(hf, tmp_path / "megatron")
    for place, key in enumerate((NORM, FUSED_NORM)):
        shutil.copytree(between, tmp_path / f"one-{place}")
        without(tmp_path / f"one-{place}", key)
        assert_same(hf, to_hf(tmp_path / f"one-{place}", tmp_path / f"back-{place}"))
    without(tmp_path / "one-0", FUSED_NORM)
    with pytest.raises(CheckpointError, match=rf"missing: {FUSED_NORM}$"):
        to_hf(tmp_path / "one-0", tmp_path / "back")
    stored = read_contents(between).tensors[NORM].chunks[0].stored
    with (between / stored.file).open("r+b") as stream:
        stream.seek(stored.offset)
        saved = io.BytesIO()
        torch.save(torch.ones(32), saved)
        assert len(saved.getvalue()) == stored.length
        stream.write(saved.getvalue())
    (between / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=rf"{FUSED_NORM} and {NORM} are one parameter, and differ"):
        to_hf(between, tmp_path / "back")
