"""Heads that are zero: the same function, no gradient, and gone again bit for bit."""

from pathlib import Path

import pytest
import torch
import transformers

from checkpoints_tools.pad_heads import main, pad_heads
from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.errors import CheckpointError
from tests.unit.conversion import FAMILIES, hf_folder, tensors_of

TOKENS_BS = torch.arange(22).view(2, 11) % 37


def model_of(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", local_files_only=True
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_padded_heads_change_neither_the_function_nor_training(family: str, tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", family)
    assert pad_heads(source, tmp_path / "padded", 8) == (16, 8)
    architecture = read_architecture(tmp_path / "padded")
    assert (architecture.heads, architecture.kv_heads, architecture.head_dim) == (16, 8, 10)
    original, padded = model_of(source), model_of(tmp_path / "padded")
    logits, expected = padded(TOKENS_BS).logits, original(TOKENS_BS).logits
    assert (logits - expected).abs().max() < 1e-12 * expected.abs().max()
    logits.square().sum().backward()
    expected.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in original.named_parameters()}
    for name, parameter in padded.named_parameters():
        own = gradients[name]
        inner = parameter.grad[tuple(slice(size) for size in own.shape)]
        assert (inner - own).abs().max() <= 1e-10 * own.abs().max(), name
        assert torch.count_nonzero(parameter.grad) == torch.count_nonzero(inner), name


def test_heads_that_are_zero_go_again_and_others_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_folder(tmp_path / "hf", "qwen2")
    pad_heads(source, tmp_path / "padded", 8)
    assert main([str(tmp_path / "padded"), str(tmp_path / "back"), "--kv-heads", "4"]) == 0
    assert "8 heads on 4 key-value heads" in capsys.readouterr().out
    first, second = tensors_of(source), tensors_of(tmp_path / "back")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj.*are not zero"):
        pad_heads(source, tmp_path / "fewer", 2)
    assert not (tmp_path / "fewer").exists()
    assert main([str(source), str(tmp_path / "none"), "--kv-heads", "0"]) == 2
    assert "--kv-heads: must be 1 to 32, as the model has 4 (got 0)" in capsys.readouterr().err
