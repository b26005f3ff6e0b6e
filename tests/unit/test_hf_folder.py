"""Hugging Face folders: whole or refused when read, whole or absent when written."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron import hf_folder
from gppo_megatron.policy.megatron.hf_folder import INDEX, HfReader, write_hf_folder

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5, -2]).bfloat16(), "c": torch.ones(4, 2)}


def contents(folder: Path) -> dict[str, torch.Tensor]:
    reader = HfReader(folder)
    return {name: reader.read(name) for name in reader.names}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor)


def test_a_written_folder_reads_back_with_its_side_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("generation_config.json", "tokenizer.json", "notes.txt"):
        (source / name).write_text(name)
    write_hf_folder(tmp_path / "deep" / "out", WEIGHTS.items(), source)
    assert_same(contents(tmp_path / "deep" / "out"), WEIGHTS)
    files = sorted(file.name for file in (tmp_path / "deep" / "out").iterdir())
    assert files == ["generation_config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "deep" / "out" / "generation_config.json").read_text() == "generation_config.json"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_what_is_written_is_the_value_at_the_time_it_came(tmp_path: Path) -> None:
    """A generator may reuse one buffer, or hand out views and transposed tensors."""
    buffer = torch.zeros(2, 3)

    def reused() -> Iterator[tuple[str, torch.Tensor]]:
        for value in (1.0, 2.0):
            yield f"row {value}", buffer.fill_(value)[0]
        yield "turned", torch.arange(6.0).reshape(2, 3).t()

    write_hf_folder(tmp_path / "out", reused(), tmp_path)
    expected = {"row 1.0": torch.full((3,), 1.0), "row 2.0": torch.full((3,), 2.0)}
    assert_same(contents(tmp_path / "out"), expected | {"turned": torch.tensor([[0.0, 3], [1, 4], [2, 5]])})


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_folder, "SHARD_BYTES", 30)  # a has 24 bytes, b 4, c 32
    write_hf_folder(tmp_path / "out", WEIGHTS.items(), tmp_path)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = {
        name: [key for key, file in index["weight_map"].items() if file == name]
        for name in index["weight_map"].values()
    }
    assert list(files.values()) == [["a", "b"], ["c"]]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {*files, INDEX}
    assert_same(contents(tmp_path / "out"), WEIGHTS)


def test_a_crash_while_writing_leaves_no_folder_and_the_next_try_succeeds(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", WEIGHTS["a"]
        raise OSError("the disk is full")

    with pytest.raises(CheckpointError, match="out cannot be written: the disk is full"):
        write_hf_folder(tmp_path / "out", broken(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_hf_folder(tmp_path / "out", WEIGHTS.items(), tmp_path)
    assert_same(contents(tmp_path / "out"), WEIGHTS)


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out exists already"):
        write_hf_folder(tmp_path / "out", iter(()), tmp_path)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"old")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors, and no .*index\.json .*convert other formats"):
        HfReader(tmp_path)


def test_an_index_that_names_missing_files_is_refused(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "one.safetensors")
    places = {"a": "one.safetensors", "d": "three.safetensors", "e": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError, match=r"files that are missing: three\.safetensors, two\.safetensors"):
        HfReader(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    save_file(WEIGHTS, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="not an index of safetensors files"):
        HfReader(tmp_path)


@pytest.mark.parametrize(
    ("kept", "message"),
    [(0, ": not a safetensors file"), (60, ": its header is damaged"), (-1, r" has \d+ bytes instead of \d+; copy it")],
)
def test_a_file_cut_short_is_named(tmp_path: Path, kept: int, message: str) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors{message}"):
        HfReader(tmp_path)


def test_a_second_copy_of_the_weights_is_left_alone(tmp_path: Path) -> None:
    """Some published folders also hold the original release's own file, with other names for the same tensors."""
    save_file({"layers.0.wq.weight": WEIGHTS["a"]}, tmp_path / "consolidated.safetensors")
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    assert_same(contents(tmp_path), WEIGHTS)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(WEIGHTS, "model-00001-of-00001.safetensors")})
    )
    assert_same(contents(tmp_path), WEIGHTS)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_names_the_dtype_that_was_written(key: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3", key: "bfloat16"}))
    write_hf_folder(tmp_path / "out", [("a", torch.zeros(2)), ("b", torch.ones(3))], source)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "qwen3", key: "float32"}
