"""FP8 folders with a scale a block, and folders whose experts are fused: read as if they were plain."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.block_scaled import dequantize
from gppo_megatron.policy.megatron.hf_folder import HfReader, write_hf_folder

BLOCK = (16, 24)
SCHEME = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def scaled(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each block over its largest number / 448, rounded to FP8; and those scales."""
    rows, columns = (-(-size // part) for size, part in zip(tensor.shape, BLOCK, strict=True))
    scales = torch.empty(rows, columns)
    quantized = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            where = (slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1]))
            scales[row, column] = tensor[where].abs().max() / 448
            quantized[where] = (tensor[where] / scales[row, column]).to(torch.float8_e4m3fn)
    return quantized, scales


def fused(tensors: dict[str, torch.Tensor], layers: tuple[int, ...], experts: int) -> dict[str, torch.Tensor]:
    """The same model with the experts of each of these layers in two tensors."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in layers:
        stem = f"model.layers.{layer}.mlp.experts"
        each = [
            [tensors[f"{stem}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for expert in range(experts)
        ]
        found[f"{stem}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        found[f"{stem}.down_proj"] = torch.stack([down for _, _, down in each])
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose projections are quantized, the scales in a file of their own."""
    create_tiny(TinyModel(experts=2, expert_ffn=20), tmp_path, seed=1)
    tensors, scales = load_file(tmp_path / "model.safetensors"), {}
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            tensors[name], scales[f"{name}_scale_inv"] = scaled(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    save_file(scales, tmp_path / "scales.safetensors")
    index = dict.fromkeys(tensors, "model.safetensors") | dict.fromkeys(scales, "scales.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    declare(tmp_path, SCHEME)
    return tmp_path


def declare(folder: Path, scheme: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": scheme}))


def test_blocks_at_the_edge_have_a_scale_of_their_own() -> None:
    weight = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 10], [100, 1000]])
    expected = torch.tensor([[1.0, 2, 30], [4, 5, 60], [700, 800, 9000]])
    assert torch.equal(dequantize(weight, scales, (2, 2)), expected)


def test_quantized_weights_are_read_as_plain_ones_within_their_precision(folder: Path, tmp_path: Path) -> None:
    create_tiny(TinyModel(experts=2, expert_ffn=20), tmp_path / "plain", seed=1)
    plain, reader = HfReader(tmp_path / "plain"), HfReader(folder)
    assert reader.names == plain.names
    for name in reader.names:
        ours, original = reader.read(name), plain.read(name)
        assert ours.dtype == torch.float32
        # e4m3 has 3 bits after the point, and below 2**-6 steps of 2**-9, times scales of at most max / 448.
        bound = original.abs() / 16 + original.abs().max() / 448 * 2**-10
        assert ((ours - original).abs() <= bound * 1.0001).all(), name
        assert torch.equal(ours, original) == (not name.endswith("_proj.weight"))
    assert HfReader(folder, torch.bfloat16).read(Q_PROJ).dtype == torch.bfloat16


def test_a_folder_written_from_quantized_weights_says_nothing_of_a_scheme(folder: Path, tmp_path: Path) -> None:
    reader = HfReader(folder)
    write_hf_folder(tmp_path / "out", ((name, reader.read(name)) for name in sorted(reader.names)), folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "float32"


@pytest.mark.parametrize("scheme", [{"quant_method": "gptq"}, {"quant_method": "fp8"}])
def test_another_scheme_is_refused(folder: Path, scheme: object) -> None:
    declare(folder, scheme)
    with pytest.raises(CheckpointError, match=f"{Q_PROJ} holds float8_e4m3fn of a scheme that is not known"):
        HfReader(folder).read(Q_PROJ)


def test_scales_that_are_missing_or_do_not_fit_are_refused(folder: Path) -> None:
    scales = load_file(folder / "scales.safetensors")
    scales[f"{Q_PROJ}_scale_inv"] = torch.ones(4, 4)
    save_file(scales, folder / "scales.safetensors")
    with pytest.raises(CheckpointError, match=r"_scale_inv has the shape \[4, 4\].*needs floating .* shape \[4, 3\]"):
        HfReader(folder).read(Q_PROJ)
    del scales[f"{Q_PROJ}_scale_inv"]
    save_file(scales, folder / "scales.safetensors")
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {name: listed[name] for name in listed if name[:-10] != Q_PROJ}}))
    with pytest.raises(CheckpointError, match="of a scheme that is not known"):
        HfReader(folder).read(Q_PROJ)


def test_a_scale_without_a_weight_stays_a_tensor_of_its_own(folder: Path) -> None:
    scales = load_file(folder / "scales.safetensors") | {"other.weight_scale_inv": torch.ones(1)}
    save_file(scales, folder / "scales.safetensors")
    assert "other.weight_scale_inv" in HfReader(folder).names


def test_fused_experts_are_read_one_at_a_time(tmp_path: Path) -> None:
    create_tiny(TinyModel(experts=3, expert_ffn=20), tmp_path, seed=1)
    plain = load_file(tmp_path / "model.safetensors")
    save_file(fused(plain, layers=(0, 1), experts=3), tmp_path / "model.safetensors")
    reader = HfReader(tmp_path)
    assert reader.names == set(plain)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in plain.items())
