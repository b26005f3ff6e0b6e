"""The parity tool: equal models are OK, a model that differs is not, and a bad folder is one message."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools import parity
from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_tiny(TinyModel(), tmp_path, seed=1)
    return tmp_path


def test_a_model_equals_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main([str(folder), "--tokens", "9"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("OK: over 9 tokens the logits differ by at most ")
    assert output.count("\n") == 1


def test_a_difference_is_measured_and_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers reads another rope_theta than Megatron did."""

    def transformers_logits(path: Path, tokens_BS: torch.Tensor) -> torch.Tensor:
        config = json.loads((path / "config.json").read_text()) | {"rope_theta": 100.0}
        (path / "config.json").write_text(json.dumps(config))
        return original(path, tokens_BS)

    original = parity.transformers_logits
    monkeypatch.setattr(parity, "transformers_logits", transformers_logits)
    assert parity.main([str(folder)]) == 1
    assert capsys.readouterr().out.startswith("DIFFERENT: over 64 tokens the logits differ by at most ")


def test_the_numbers_are_those_of_the_logits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BSV = torch.tensor([[[1.0, -4.0], [2.0, 0.5]]])
    monkeypatch.setattr(parity, "megatron_logits", lambda *_: logits_BSV + torch.tensor([[[0.0, -1.0], [0.25, 0.0]]]))
    monkeypatch.setattr(parity, "transformers_logits", lambda *_: logits_BSV)
    found = parity.compare(folder, tokens=2)
    assert (found.absolute, found.largest, found.relative) == (1.0, 4.0, 0.25)
    assert parity.main([str(folder), "--tolerance", "0.25"]) == 0
    assert parity.main([str(folder), "--tolerance", "0.2"]) == 1


def test_a_logit_that_is_no_number_is_a_difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "megatron_logits", lambda *_: torch.full((1, 2, 3), torch.nan))
    monkeypatch.setattr(parity, "transformers_logits", lambda *_: torch.ones(1, 2, 3))
    assert parity.main([str(folder)]) == 1


def test_mistakes_are_one_message_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main([str(folder / "absent")]) == 2
    assert "config.json: no such file" in capsys.readouterr().err
    assert parity.main([str(folder), "--tokens", "0"]) == 2
    assert "--tokens: must be 1 to 512" in capsys.readouterr().err
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    assert parity.main([str(folder)]) == 4
    assert "missing: model.norm.weight" in capsys.readouterr().err
    assert parity.main([str(folder)]) == 4, "a failure leaves nothing behind that spoils the next call"
