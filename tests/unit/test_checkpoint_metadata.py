"""Reading a distributed checkpoint without trusting it: what a pickle may name, and what is complete."""

import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from gppo_megatron.checkpoint.metadata import check, read_common, read_contents
from gppo_megatron.checkpoint.pickles import FORCING, load_saved, refuse_forced_unpickling
from gppo_megatron.errors import CheckpointError


class Hostile:
    """Unpickled without restriction, it makes the folder `ran`."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.ran),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as Megatron-Core lays it out: two tensors, an object, and what is common."""
    folder = tmp_path / "checkpoint"
    state = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.ones(5, dtype=torch.bfloat16), "rng": {"seed": 1}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    torch.save({"iteration": 3, "weights": torch.ones(2), "args": Namespace(lr=0.1)}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


def test_the_contents_are_read_without_torch(folder: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from gppo_megatron.checkpoint.metadata import check, read_common
contents = check(Path({str(folder)!r}))
found = {{key: (tensor.shape, tensor.dtype) for key, tensor in contents.tensors.items()}}
assert found == {{"a": ((4, 3), "float32"), "b": ((5,), "bfloat16")}}
(chunk,) = contents.tensors["a"].chunks
assert (chunk.offsets, chunk.sizes) == ((0, 0), (4, 3))
assert list(contents.objects) == ["rng.seed"]
common = read_common(Path({str(folder)!r}))
assert common["iteration"] == 3 and common["args"].lr == 0.1
assert not {{"torch", "numpy", "megatron"}} & set(sys.modules), "heavy imports"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_chunks_lie_where_they_are_said_to_lie(folder: Path) -> None:
    (chunk,) = read_contents(folder).tensors["a"].chunks
    with (folder / chunk.stored.file).open("rb") as stream:
        stream.seek(chunk.stored.offset)
        held = torch.load(io.BytesIO(stream.read(chunk.stored.length)), weights_only=True)
    assert torch.equal(held, torch.arange(12.0).reshape(4, 3))


def test_a_hostile_metadata_runs_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"\.metadata is not safe to load, .* asks for posix.mkdir, which no"):
        check(folder)
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert (tmp_path / "ran").exists()  # so the pickle was a hostile one


def test_a_hostile_common_file_runs_nothing(folder: Path, tmp_path: Path) -> None:
    torch.save({"iteration": Hostile(tmp_path / "ran")}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"common.pt is not safe to load, .* posix.mkdir"):
        check(folder)
    assert not (tmp_path / "ran").exists()


def test_a_hostile_object_in_a_shard_runs_nothing(folder: Path, tmp_path: Path) -> None:
    """Torch would unpickle it without restriction."""
    stored = read_contents(folder).objects["rng.seed"]
    data, blob = (folder / stored.file).read_bytes(), io.BytesIO()
    torch.save(Hostile(tmp_path / "ran"), blob)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "rng.seed":
            info.offset, info.length = len(data), len(blob.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / stored.file).write_bytes(data + blob.getvalue())
    with pytest.raises(CheckpointError, match=r"distcp: rng.seed is not safe to load, .* posix.mkdir"):
        check(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n.",
        b"ctorch\nload\n.",
        b"ctorch.serialization\nload\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n.",
        b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
        b"Pname\n.",
    ],
    ids=["system", "eval", "getattr", "torch.load", "serialization.load", "dotted", "attribute", "persistent"],
)
def test_names_beyond_the_list_are_refused(folder: Path, payload: bytes) -> None:
    (folder / ".metadata").write_bytes(payload)
    with pytest.raises(CheckpointError, match=r"\.metadata is not safe to load"):
        read_contents(folder)


def test_a_pickle_cannot_change_the_classes_it_names(folder: Path) -> None:
    """BUILD on a class, with a pair as state, would set attributes of the class itself."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (folder / ".metadata").write_bytes(name + b"(N(dS'__setstate__'\nS'x'\nstb.")
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        read_contents(folder)


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_cut_pickle_is_one_sentence(folder: Path, cut: int) -> None:
    file = folder / ".metadata"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"\.metadata is ") as caught:
        check(folder)
    assert "\n" not in str(caught.value)


def shard(folder: Path) -> Path:
    return folder / read_contents(folder).tensors["a"].chunks[0].stored.file


def cut_shard(folder: Path) -> None:
    file = shard(folder)
    file.write_bytes(file.read_bytes()[:-1])


def point_outside(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "metadata.json").unlink(), "has no metadata.json: writing it was never completed"),
        (lambda folder: (folder / "metadata.json").write_text("["), r"metadata.json is damaged"),
        (lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "of the format 'zarr'"),
        (lambda folder: (folder / ".metadata").unlink(), r"\.metadata cannot be read \(No such file or directory\)"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"a": 1})), r"of another version of torch"),
        (lambda folder: (folder / "common.pt").unlink(), "common.pt cannot be read"),
        (lambda folder: (folder / "common.pt").write_bytes(b"PK"), "common.pt is damaged"),
        (lambda folder: shard(folder).unlink(), r"\.distcp is missing"),
        (cut_shard, r"\.distcp is cut short, \d+ bytes instead of at least \d+"),
        (point_outside, r"points outside the checkpoint, to '\.\./secret'"),
    ],
    ids=["no json", "bad json", "format", "no metadata", "other", "no common", "bad common", "no shard", "cut", "out"],
)
def test_an_incomplete_checkpoint_is_one_sentence(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        check(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("TRUE", True), ("yes", True), ("0", False), ("", False)])
def test_an_environment_that_forces_unpickling_is_refused(value: str, refused: bool) -> None:
    if refused:
        with pytest.raises(CheckpointError, match=f"{FORCING}={value} makes torch run any code"):
            refuse_forced_unpickling({FORCING: value})
    else:
        refuse_forced_unpickling({FORCING: value})


def test_the_check_looks_at_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCING, "1")
    with pytest.raises(CheckpointError, match=FORCING):
        check(folder)


def saved(value: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def test_what_a_trainer_saves_is_read() -> None:
    generators = {
        "torch": torch.get_rng_state(), "numpy": np.random.default_rng(0).bytes(4),
        "legacy": np.random.RandomState(1).get_state(), "cuda": torch.device("cuda", 0),
    }  # fmt: skip
    held = load_saved(saved({"rng": [generators], "step": 3, "dtype": torch.bfloat16, "names": {"a"}}), "here")
    assert held["step"] == 3
    assert held["dtype"] == "bfloat16"
    assert held["names"] == {"a"}
    assert held["rng"][0]["numpy"] == generators["numpy"]


def test_the_format_before_zip_is_refused() -> None:
    stream = io.BytesIO()
    torch.save({"a": 1}, stream, _use_new_zipfile_serialization=False)
    stream.seek(0)
    with pytest.raises(CheckpointError, match="of a format older than torch 1.6"):
        load_saved(stream, "here")


def test_a_common_file_of_another_program_is_refused(folder: Path) -> None:
    with zipfile.ZipFile(folder / "common.pt", "a") as archive:
        archive.writestr("common/code/__torch__.py", "pass")
    with pytest.raises(CheckpointError, match="common.pt is no file that torch.save writes"):
        read_common(folder)
