"""Weights that do not fit config.json are refused by name, and those that fit arrive unchanged."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import CheckpointError
from tests.single_process import model_of, world_of_one

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_tiny(TinyModel(), tmp_path, seed=1)
    return tmp_path


def change(folder: Path, added: dict[str, torch.Tensor], removed: tuple[str, ...] = ()) -> None:
    tensors = load_file(folder / "model.safetensors") | added
    save_file({name: tensor for name, tensor in tensors.items() if name not in removed}, folder / "model.safetensors")


def test_every_tensor_arrives_unchanged(folder: Path) -> None:
    weights = dict(model_of(folder).export())
    tensors = load_file(folder / "model.safetensors")
    assert next(iter(weights)) == EMBEDDING
    assert set(weights) == set(tensors)
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())


def test_missing_and_surplus_tensors_are_named_together(folder: Path) -> None:
    change(folder, {"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}, removed=(Q_PROJ, NORM))
    with pytest.raises(CheckpointError) as error:
        model_of(folder)
    assert f"missing: {Q_PROJ}, {NORM}" in str(error.value)
    assert "not part of this model: model.layers.2.mlp.up_proj.weight" in str(error.value)


def test_a_long_list_is_cut(folder: Path) -> None:
    change(folder, {f"extra.{number}": torch.ones(1) for number in range(9)})
    with pytest.raises(CheckpointError, match=r"extra\.0, extra\.1, extra\.2, extra\.3, extra\.4 and 4 more"):
        model_of(folder)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        (Q_PROJ, (32, 64), "[64, 64]"),
        (Q_PROJ, (33, 64), "[64, 64]"),
        (NORM, (63,), "[64]"),
        (EMBEDDING, (20, 64), "[21, 64]"),
        (EMBEDDING, (22, 64), "[21, 64]"),
        ("model.layers.0.self_attn.k_proj.weight", (32, 63), "[32, 64]"),
        ("model.layers.0.mlp.down_proj.weight", (192, 64), "[64, 192]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(folder: Path, name: str, shape: tuple[int, ...], wanted: str) -> None:
    change(folder, {name: torch.ones(shape)})
    with pytest.raises(CheckpointError) as error:
        model_of(folder)
    assert f"; {name} has the shape {list(shape)} instead of {wanted}" in str(error.value)


def test_shapes_that_only_fit_in_sum_are_named(folder: Path) -> None:
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    change(folder, {gate: torch.ones(100, 64), up: torch.ones(284, 64)})
    with pytest.raises(CheckpointError) as error:
        model_of(folder)
    assert str(error.value).endswith(
        f"; {gate} has the shape [100, 64] instead of [192, 64]; {up} has the shape [284, 64] instead of [192, 64]"
    )


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [Q_PROJ, NORM])
def test_numbers_that_are_not_finite_are_found(folder: Path, name: str, damage: float) -> None:
    tensor = load_file(folder / "model.safetensors")[name]
    tensor.view(-1)[3] = damage
    change(folder, {name: tensor})
    with pytest.raises(
        CheckpointError, match=r"NaN or infinity in .*(linear_qkv|final_layernorm).*; the weights are damaged"
    ):
        model_of(folder)


def test_integers_are_no_weights(folder: Path) -> None:
    change(folder, {Q_PROJ: torch.ones(64, 64, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=f"{Q_PROJ} holds torch.int32, no floating numbers"):
        model_of(folder)


def test_tensors_that_follow_from_others_may_be_there(folder: Path) -> None:
    """A tied head, and the rotary frequencies that older folders store."""
    expected = dict(model_of(folder).export())
    change(
        folder, {"lm_head.weight": torch.zeros(21, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model_of(folder).export())
