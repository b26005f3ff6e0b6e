"""Hugging Face to Megatron-Core and back: exact, complete or not there at all, and refused in one sentence."""

import errno
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

import checkpoints_tools.sources
import checkpoints_tools.work
from checkpoints_tools.activations import hf_activations, megatron_activations
from checkpoints_tools.convert import Options, hf_to_megatron, reshard
from checkpoints_tools.sources import open_megatron
from checkpoints_tools.targets import HashingStream
from checkpoints_tools.verify import compare_folders, first_difference, relative
from gppo_megatron.checkpoint.manifest import MANIFEST, verify
from gppo_megatron.checkpoint.metadata import read_contents
from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.schema import Parallel
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, named_parameters, transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.stored_layout import stored_layout
from gppo_megatron.policy.megatron.weights import load
from tests.single_process import world_of_one
from tests.unit.conversion import (
    FAMILIES,
    GATE,
    assert_same,
    change,
    hf_folder,
    silent,
    split_in_two,
    tensors_of,
    to_hf,
    to_megatron,
)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "hf")


@pytest.fixture
def megatron(hf: Path, tmp_path: Path) -> Path:
    return to_megatron(hf, tmp_path / "megatron")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Megatron-Core calls what torch will drop
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_round_trip_changes_no_bit_and_megatron_loads_what_is_between(
    family: str, tied: bool, tmp_path: Path
) -> None:
    source = hf_folder(tmp_path / "hf", family, tied)
    between = to_megatron(source, tmp_path / "megatron")
    assert_same(source, to_hf(between, tmp_path / "back"))
    verify(between)
    verify(tmp_path / "back")
    architecture = read_architecture(source)
    with world_of_one():
        config = transformer_config(architecture, Parallel(), CPU, torch.float32, {})
        ours, theirs = (build_model(config, architecture, CPU) for _ in range(2))
        load(ours, architecture, HfReader(source))
        state = theirs[0].module.sharded_state_dict(prefix="")
        dist_checkpointing.load(state, between, strict=StrictHandling.RAISE_UNEXPECTED)
        for (name, a), (_, b) in zip(named_parameters(ours), named_parameters(theirs), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_both_sides_compute_the_same_logits(family: str, tied: bool, tmp_path: Path) -> None:
    """Bit for bit but with experts, whose sum transformers takes in another order."""
    hf = hf_folder(tmp_path / "hf", family, tied)
    megatron = to_megatron(hf, tmp_path / "megatron")
    architecture = read_architecture(hf)
    layout = stored_layout(architecture)
    tokens_BS = torch.randint(37, (1, 23), generator=torch.Generator().manual_seed(5))
    theirs_BSV = hf_activations(hf, tokens_BS)[-1]
    ours_BSV = megatron_activations(open_megatron(megatron, layout), layout, architecture, tokens_BS)[-1]
    assert relative(ours_BSV, theirs_BSV) <= (2e-6 if family == "qwen3_moe" else 0)
    assert theirs_BSV.std() > 0.1


def test_each_tensor_keeps_its_dtype_and_another_one_is_asked_for(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", dtype=torch.bfloat16)
    assert_same(source, to_hf(to_megatron(source, tmp_path / "megatron"), tmp_path / "back"))
    wide = to_hf(tmp_path / "megatron", tmp_path / "wide", dtype=torch.float32)
    for name, tensor in tensors_of(wide).items():
        assert torch.equal(tensor, tensors_of(source)[name].float())
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"
    half = to_megatron(wide, tmp_path / "half", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in read_contents(half).tensors.values()} == {"bfloat16"}
    assert_same(source, to_hf(half, tmp_path / "again"))


def test_several_files_give_the_same_model(hf: Path, tmp_path: Path) -> None:
    split_in_two(hf)
    between = to_megatron(hf, tmp_path / "megatron", file_bytes=8192)
    assert len(list(between.glob("__0_*.distcp"))) > 3
    back = to_hf(between, tmp_path / "back", file_bytes=8192)
    assert_same(hf, back)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(hf).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors_of(hf).values())


def test_resharding_cuts_chunks_and_changes_no_number(megatron: Path, hf: Path, tmp_path: Path) -> None:
    reshard(megatron, tmp_path / "cut", Options(tensor=2), silent)
    contents = read_contents(tmp_path / "cut").tensors
    (whole,) = read_contents(megatron).tensors["embedding.word_embeddings.weight"].chunks
    assert whole.sizes == (37, 32)  # which 2 does not divide: it stays whole
    qkv = contents["decoder.layers.self_attention.linear_qkv.weight"].chunks
    assert sorted((chunk.offsets, chunk.sizes) for chunk in qkv) == [
        ((layer, row, 0), (1, 80, 32)) for layer in (0, 1) for row in (0, 80)
    ]
    proj = contents["decoder.layers.self_attention.linear_proj.weight"].chunks
    assert {chunk.sizes for chunk in proj} == {(1, 32, 40)}
    assert_same(hf, to_hf(tmp_path / "cut", tmp_path / "back"))


def test_a_padded_vocabulary_is_trimmed(megatron: Path, hf: Path, tmp_path: Path) -> None:
    """Three more rows than the vocabulary, as a trainer with tensor parallelism stores them."""
    contents = read_contents(megatron).tensors["embedding.word_embeddings.weight"]
    (chunk,) = contents.chunks
    metadata = pickle.loads((megatron / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    entry.size = torch.Size((40, 32))
    entry.chunks[0].sizes = torch.Size((40, 32))
    with (megatron / chunk.stored.file).open("ab") as stream:
        begin = stream.tell()
        torch.save(torch.cat([tensors_of(hf)["model.embed_tokens.weight"], torch.zeros(3, 32)]), stream)
        length = stream.tell() - begin
    for index, info in metadata.storage_data.items():
        if index.fqn == "embedding.word_embeddings.weight":
            info.offset, info.length = begin, length
    (megatron / ".metadata").write_bytes(pickle.dumps(metadata))
    (megatron / "manifest.json").unlink()
    assert_same(hf, to_hf(megatron, tmp_path / "back"))


def test_an_interrupted_conversion_goes_on_where_it_was(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    original = checkpoints_tools.work.write_file

    def write(folder: Path, file: Any, *rest: Any) -> Any:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(file.name)
        return original(folder, file, *rest)

    monkeypatch.setattr(checkpoints_tools.work, "write_file", write)
    with pytest.raises(KeyboardInterrupt):
        to_megatron(hf, tmp_path / "megatron", file_bytes=8192)
    assert not (tmp_path / "megatron").exists()
    first, written[:] = written.copy(), []
    with pytest.raises(KeyboardInterrupt):
        to_megatron(hf, tmp_path / "megatron", file_bytes=8192)
    assert len(written) == 3
    assert not set(first) & set(written)
    monkeypatch.setattr(checkpoints_tools.work, "write_file", original)
    said: list[str] = []
    hf_to_megatron(hf, tmp_path / "megatron", Options(file_bytes=8192), said.append)
    assert any(line.startswith("going on: 6 of ") for line in said)
    assert_same(hf, to_hf(tmp_path / "megatron", tmp_path / "back"))
    assert not list((tmp_path / "megatron").rglob("*journal*"))


def test_a_disk_that_fills_up_is_one_sentence(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own writer turns the error of the disk into another one."""

    class Full(HashingStream):
        def write(self, data: bytes | memoryview) -> int:
            if self.bytes > 20_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(checkpoints_tools.work, "HashingStream", Full)
    for convert, target in ((to_megatron, "megatron"), (to_hf, "back")):
        source = hf
        if convert is to_hf:
            monkeypatch.undo()
            source = to_megatron(hf, tmp_path / "whole")
            monkeypatch.setattr(checkpoints_tools.work, "HashingStream", Full)
        with pytest.raises(CheckpointError, match=f"{target} cannot be written: the disk is full"):
            convert(source, tmp_path / target)
        assert not (tmp_path / target).exists()


def test_what_was_written_from_another_source_is_not_gone_on_with(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("checkpoints_tools.convert._finish_megatron", fail)
    with pytest.raises(KeyboardInterrupt):
        to_megatron(hf, tmp_path / "megatron", file_bytes=8192)
    monkeypatch.undo()
    change(hf, GATE, torch.ones(64, 32))
    said: list[str] = []
    hf_to_megatron(hf, tmp_path / "megatron", Options(file_bytes=8192), said.append)
    assert not any(line.startswith("going on") for line in said)
    assert_same(hf, to_hf(tmp_path / "megatron", tmp_path / "back"))


def test_a_conversion_killed_at_twenty_moments_never_leaves_a_folder_that_loads(hf: Path, tmp_path: Path) -> None:
    killer = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.conversion_killer", str(hf), str(tmp_path)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert killer.stdout.strip() == "20"
    assert_same(hf, to_hf(tmp_path / "target", tmp_path / "back"))


def test_verify_names_the_layer_and_the_tensor_that_differ(hf: Path, megatron: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert compare_folders(hf, megatron, 8, said.append)
    assert "tensors: 25 of 25 are equal bit for bit" in said
    other = tmp_path / "other"
    shutil.copytree(hf, other)
    change(other, GATE, tensors_of(hf)[GATE] + 0.5)
    said.clear()
    assert not compare_folders(other, megatron, 8, said.append)
    assert "tensors: 24 of 25 are equal bit for bit" in said
    assert any(line.strip().startswith(f"{GATE} differs by up to 0.5") for line in said)
    assert f"the first difference arises in layer 1; the first tensor to differ there is {GATE}" in said
    assert said[-1] == "DIFFERENT"


def test_bisection_finds_the_first_layer() -> None:
    same = [torch.full((2,), float(i + 1)) for i in range(9)]
    for place in range(9):
        other = [tensor + (i >= place) for i, tensor in enumerate(same)]
        assert first_difference(other, same, 1e-5) == place
    assert first_difference(same, same, 0.0) is None


def test_targets_count_the_bytes_they_write(hf: Path, tmp_path: Path) -> None:
    """What the room on the disk and the progress are reckoned by."""
    said: list[str] = []
    hf_to_megatron(hf, tmp_path / "megatron", Options(), said.append)
    total = sum(tensor.nbytes for tensor in tensors_of(hf).values())
    assert said[0].startswith(f"{total // 4:,} parameters in ")
    assert MANIFEST in {path.name for path in (tmp_path / "megatron").iterdir()}
