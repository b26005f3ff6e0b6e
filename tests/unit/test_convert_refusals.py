"""What a conversion refuses, in one sentence, before or without a target."""

import json
import math
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_tools.bridge import MegatronBridge
from checkpoints_tools.convert import Options, reshard
from checkpoints_tools.layouts import Cuts, cut_problems
from gppo_megatron.checkpoint import folder as checkpoint_folder
from gppo_megatron.checkpoint.manifest import verify
from gppo_megatron.checkpoint.metadata import read_contents
from gppo_megatron.checkpoint.pickles import FORCING
from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.errors import CheckpointError, ConfigError
from gppo_megatron.policy.megatron import hf_folder as hf_folder_module
from tests.unit.conversion import (
    GATE,
    change,
    hf_folder,
    silent,
    split_in_two,
    to_hf,
    to_megatron,
)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "hf")


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    return to_megatron(hf, tmp_path / "megatron")


def test_a_dry_run_reads_no_weights_and_writes_nothing(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(hf_folder_module, "safe_open", refuse)
    to_megatron(hf, tmp_path / "megatron", dry=True)
    change(hf, "model.norm.weight", None)
    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight$"):
        to_megatron(hf, tmp_path / "megatron", dry=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (GATE, None, rf"missing: {GATE}$"),
        ("model.extra.weight", torch.ones(2), r"not part of this model: model\.extra\.weight$"),
        (GATE, torch.ones(32, 64), r"of another shape: .*gate_proj.weight \[32, 64\] instead of \[64, 32\]$"),
        (GATE, torch.ones(64, 32, dtype=torch.int8), r"not in a dtype that is converted: .*gate_proj.weight \(int8\)"),
        (GATE, torch.ones(64, 32, dtype=torch.float16), r"of different dtypes, though one parameter: .*gate_proj"),
        (GATE, torch.full((64, 32), math.nan), r"NaN or infinity in .*gate_proj.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    hf: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    change(hf, name, tensor)
    with pytest.raises(CheckpointError, match=message) as caught:
        to_megatron(hf, tmp_path / "megatron")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "megatron").exists()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def ghost(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    held["weight_map"]["model.ghost.weight"] = "a.safetensors"
    index.write_text(json.dumps(held))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: cut(folder / "b.safetensors"), r"b\.safetensors has \d+ bytes instead of \d+; copy it again"),
        (lambda folder: (folder / "b.safetensors").unlink(), r"names files that are missing: b\.safetensors"),
        (
            lambda folder: (folder / "model.safetensors.index.json").unlink(),
            r"2 safetensors files and no .*index\.json",
        ),
        (ghost, "names tensors that its files do not hold: model.ghost.weight"),
        (lambda folder: (folder / "b.safetensors").write_bytes(b"x" * 100), "b.safetensors: not a safetensors file"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "holds an adapter"),
    ],
    ids=["cut", "missing", "no index", "ghost", "other", "adapter"],
)
def test_a_damaged_hugging_face_folder_is_one_sentence(hf: Path, tmp_path: Path, damage: Any, message: str) -> None:
    split_in_two(hf)
    damage(hf)
    with pytest.raises(CheckpointError, match=message) as caught:
        to_megatron(hf, tmp_path / "megatron")
    assert "\n" not in str(caught.value)


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def a_chunk(folder: Path) -> tuple[Path, int]:
    """A file and the place of a byte of a tensor in it."""
    stored = read_contents(folder).tensors["decoder.final_layernorm.weight"].chunks[0].stored
    return folder / stored.file, stored.offset + stored.length // 2


def test_a_flipped_byte_is_found_by_verify_and_by_a_conversion(megatron: Path, hf: Path, tmp_path: Path) -> None:
    back = to_hf(megatron, tmp_path / "back")
    flip(*a_chunk(megatron))
    flip(back / "model.safetensors", -1)
    for folder, name, convert in ((megatron, "distcp", to_hf), (back, "model.safetensors", to_megatron)):
        for read in (verify, lambda folder, convert=convert: convert(folder, tmp_path / "copy")):
            with pytest.raises(CheckpointError, match=rf"the content of .*{name} has changed since it was written"):
                read(folder)
    assert not (tmp_path / "copy").exists()


def drop_key(folder: Path) -> None:
    edit(folder, lambda metadata: metadata.state_dict_metadata.pop("decoder.final_layernorm.weight"))


def add_key(folder: Path) -> None:
    edit(folder, lambda m: m.state_dict_metadata.update(extra=m.state_dict_metadata["decoder.final_layernorm.weight"]))


def make_hole(folder: Path) -> None:
    edit(folder, lambda m: m.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop())


def edit(folder: Path, change_it: Any) -> None:
    """As another program would have written it, which lists no checksums."""
    (folder / "manifest.json").unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change_it(metadata)
    for key, entry in metadata.state_dict_metadata.items():
        if key == "extra":
            for index, info in list(metadata.storage_data.items()):
                if index.fqn == "decoder.final_layernorm.weight":
                    metadata.storage_data[type(index)(key, index.offset)] = info
            assert entry.chunks
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('ran')",))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_key, r"missing: decoder\.final_layernorm\.weight$"),
        (add_key, r"not part of this model: extra$"),
        (make_hole, r"not complete: decoder\.layers\.mlp\.linear_fc2\.weight$"),
        (lambda folder: cut(folder / "__0_0.distcp"), r"__0_0\.distcp is cut short"),
        (lambda folder: (folder / ".metadata").unlink(), r"\.metadata cannot be read"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Hostile())), r"asks for builtins\.exec"),
    ],
    ids=["missing", "surplus", "hole", "cut", "no metadata", "hostile"],
)
def test_a_damaged_distributed_checkpoint_is_one_sentence(
    megatron: Path, tmp_path: Path, damage: Any, message: str
) -> None:
    damage(megatron)
    with pytest.raises(CheckpointError, match=message) as caught:
        to_hf(megatron, tmp_path / "back")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "back").exists()


def test_an_environment_that_forces_unpickling_is_refused(
    megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCING, "1")
    with pytest.raises(CheckpointError, match=FORCING):
        to_hf(megatron, tmp_path / "back")


def test_an_existing_target_and_a_full_disk_are_refused(
    hf: Path, megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="megatron exists already; a checkpoint is never overwritten"):
        to_megatron(hf, megatron)
    room = namedtuple("room", "total used free")(10, 10, 0)
    monkeypatch.setattr(checkpoint_folder.shutil, "disk_usage", lambda _: room)
    with pytest.raises(CheckpointError, match=r"0\.00 GiB are to be written and 0\.00 GiB are free"):
        to_megatron(hf, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_of_the_other_kind_is_named(hf: Path, megatron: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"hf is a Hugging Face folder; hf-to-megatron converts it"):
        to_hf(hf, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"megatron is a distributed checkpoint of Megatron-Core; megatron-to-hf"):
        to_megatron(megatron, tmp_path / "x")
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        to_megatron(tmp_path / "nowhere", tmp_path / "x")
    (hf / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"hf: no config\.json; name the model's own folder with --config"):
        to_megatron(hf, tmp_path / "x")


def test_reshard_does_not_drop_the_state_of_a_training_run(megatron: Path, tmp_path: Path) -> None:
    def add(metadata: Any) -> None:
        key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
        norm = "decoder.final_layernorm.weight"
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata[norm]
        for index, info in list(metadata.storage_data.items()):
            if index.fqn == norm:
                metadata.storage_data[type(index)(key, index.offset)] = info

    edit(megatron, add)
    with pytest.raises(CheckpointError, match=r"holds the state of a training run \(optimizer\.state\.exp_avg"):
        reshard(megatron, tmp_path / "cut", Options(), silent)
    to_hf(megatron, tmp_path / "back")  # of the weights alone


def test_layouts_that_do_not_divide_are_named(hf: Path) -> None:
    architecture = read_architecture(hf)
    assert cut_problems(architecture, Cuts(tensor=4, pipeline=2)) == []
    assert cut_problems(architecture, Cuts(tensor=8)) == []
    assert cut_problems(architecture, Cuts(tensor=3, pipeline=4)) == [
        "--tensor 3 does not divide the 8 attention heads",
        "--tensor 3 does not divide the 64 rows of the MLP",
        "--pipeline 4 does not divide the 2 layers",
        "--tensor 3 does not divide the 4 key-value heads",
    ]


def test_megatron_bridge_is_refused_where_it_is_not_installed() -> None:
    with pytest.raises(ConfigError, match=r"it is not installed; pip install megatron-bridge==0\.3\.1"):
        MegatronBridge()
