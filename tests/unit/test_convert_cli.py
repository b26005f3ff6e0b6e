"""`gppo convert`: what it prints, and its exit status."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints_tools.inspect import describe
from gppo_megatron.cli import main
from gppo_megatron.errors import CheckpointError
from tests.unit.conversion import assert_same, hf_folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    hf, megatron = hf_folder(tmp_path / "hf"), tmp_path / "megatron"
    assert main(["convert", "hf-to-megatron", str(hf), str(megatron)]) == 0
    return hf, megatron


def test_the_commands_convert_look_and_compare(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, megatron = folders
    assert main(["convert", "megatron-to-hf", str(megatron), str(tmp_path / "back")]) == 0
    assert_same(hf, tmp_path / "back")
    assert main(["convert", "verify", str(megatron)]) == 0
    assert main(["convert", "verify", str(hf), str(tmp_path / "back")]) == 0
    assert main(["convert", "reshard", str(megatron), "--tensor", "2", "--pipeline", "2"]) == 0
    assert main(["convert", "reshard", str(megatron), str(tmp_path / "cut"), "--tensor", "2"]) == 0
    errors = capsys.readouterr().err
    assert "names, shapes and dtypes fit config.json" in errors
    assert "GiB, " in errors
    assert "MiB/s, 0 s left" in errors
    assert main(["convert", "reshard", str(megatron), "--tensor", "3"]) == 2
    assert main(["convert", "hf-to-megatron", str(hf), str(megatron)]) == 4
    assert main(["convert", "hf-to-megatron", str(hf), str(tmp_path / "x"), "--processes", "0"]) == 2
    assert main(["convert", "hf-to-megatron", str(hf), str(tmp_path / "x"), "--provider", "mbridge"]) == 2
    assert "no such provider; there are builtin, megatron-bridge" in capsys.readouterr().err


def test_verify_says_what_it_cannot_do(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, megatron = folders
    assert main(["convert", "verify", str(hf), str(megatron), "--tokens", "100000"]) == 0
    assert "--tokens 100000: the model has " in capsys.readouterr().err
    assert main(["convert", "verify", str(hf)]) == 4
    assert "has no manifest.json: writing it was never completed, or it is no folder of" in capsys.readouterr().err
    assert main(["convert", "verify", str(megatron.parent)]) == 4
    assert f"name one of the folders in it that have one ({megatron.name})" in capsys.readouterr().err


def test_inspect_wants_a_configuration(folders: tuple[Path, Path]) -> None:
    hf, _ = folders
    (hf / "config.json").write_text("")
    lines, complete = describe(hf)
    assert not complete
    assert f"complete: no; {hf / 'config.json'} cannot be read" in lines[1]
    (hf / "config.json").unlink()
    assert describe(hf)[0][1] == "complete: no; there is no config.json"


def test_inspect_reads_headers_alone_and_needs_no_torch(folders: tuple[Path, Path]) -> None:
    hf, megatron = folders
    code = """
import sys
from gppo_megatron.cli import main
status = main(["convert", "inspect", sys.argv[1]])
assert not {"torch", "megatron", "transformers"} & set(sys.modules), "heavy imports"
sys.exit(status)
"""
    found = {}
    for folder in (hf, megatron):
        looked = subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True)
        found[folder] = looked.stdout.splitlines()
    assert found[hf][0] == "kind: Hugging Face (safetensors)"
    assert "weights: 25 tensors, 30,216 numbers, 0.1 MiB in 1 files" in found[hf]
    architecture = (
        "architecture: qwen3, 2 layers, hidden 32, 8 heads (4 key-value) of 10, mlp 64, vocabulary 37, untied"
    )
    for lines in found.values():
        assert architecture in lines
    assert found[megatron][0] == "kind: distributed checkpoint of Megatron-Core (torch_dist)"
    assert found[megatron][1].startswith("complete: yes; all ")
    assert "weights: 11 keys, 30,216 numbers" in found[megatron]
    assert "padding: 0 rows (37 for a vocabulary of 37)" in found[megatron]
    assert "dtypes: float32 (11)" in found[megatron]


def test_inspect_says_why_a_folder_is_not_complete(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, megatron = folders
    shard = megatron / "__0_0.distcp"
    os.truncate(shard, shard.stat().st_size - 1)
    assert main(["convert", "inspect", str(megatron)]) == 4
    assert "complete: no; " in capsys.readouterr().out
    (megatron / ".metadata").write_bytes(pickle.dumps(print))
    lines, complete = describe(megatron)
    assert not complete
    assert "asks for builtins.print, which no checkpoint needs" in lines[1]
    os.truncate(hf / "model.safetensors", 5000)
    lines, complete = describe(hf)
    assert not complete
    assert "instead of" in lines[1]
    (tmp_path / "a.unfinished").mkdir()
    assert describe(tmp_path / "a.unfinished") == (
        ["kind: unfinished; writing it was never completed (.unfinished)"],
        False,
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither a Hugging Face folder nor a distributed checkpoint"):
        describe(tmp_path / "empty")
