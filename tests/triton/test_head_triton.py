"""The head's Triton kernels, in Triton's interpreter, against the torch path; run by `make test-triton`."""

import os

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

from gppo_megatron.policy.megatron import head  # noqa: E402
from gppo_megatron.policy.megatron.head import TokenStatistics, VocabShard, token_statistics  # noqa: E402
from gppo_megatron.policy.megatron.head_chunk import TorchScratch, scratch_of  # noqa: E402
from gppo_megatron.policy.megatron.head_triton import TILE, TritonScratch  # noqa: E402

COLUMNS, PADDING, WIDTH, START = 2 * TILE + 77, 5, 8, 1000
VOCAB = START + COLUMNS - PADDING
LABELS = [START, START + TILE - 1, START + TILE, VOCAB - 1, 3, START + 2 * TILE, 0]
"""The first and last columns of tiles, and two labels of another shard."""

Tensors = tuple[torch.Tensor, ...]


def run(
    dtype: torch.dtype, temperature: float, rows_at_once: int | None, used: str, scale: float = 1.0
) -> tuple[TokenStatistics, Tensors]:
    """Statistics, and the gradients of hidden rows and weight of a mix of those marked in `used`."""
    generator = torch.Generator().manual_seed(7)
    hidden_NH = (torch.randn(len(LABELS), WIDTH, generator=generator) * scale).to(dtype).requires_grad_()
    weight_VH = torch.randn(COLUMNS, WIDTH, generator=generator).to(dtype).requires_grad_()
    mix_4N = torch.randn(4, len(LABELS), generator=generator)
    shard = VocabShard(START, VOCAB, None)
    ours = token_statistics(hidden_NH, weight_VH, torch.tensor(LABELS), shard, temperature, rows_at_once)
    here_N = torch.tensor([label >= START for label in LABELS])
    # Without the other shard its labels' log-probs are -inf.
    parts = [torch.where(here_N, ours.logprobs_N, 0.0), *ours[1:4]]
    loss = sum((mix_N * part_N).sum() for mix_N, part_N, use in zip(mix_4N, parts, used, strict=True) if use == "1")
    return ours, torch.autograd.grad(loss, (hidden_NH, weight_VH))


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("used", ["1111", "1000", "0100", "0010", "0001"])
@pytest.mark.parametrize(("temperature", "rows_at_once", "scratch"), [(1.0, None, 2**25), (0.7, 3, 12000)])
def test_float32(
    temperature: float,
    rows_at_once: int | None,
    scratch: int,
    used: str,
    scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12,000 bytes: 1,000 columns of 3 rows."""
    monkeypatch.setattr(head, "SCRATCH_BYTES", scratch)
    expected, expected_gradients = run(torch.float32, temperature, rows_at_once, used, scale)
    monkeypatch.setattr(head, "scratch_of", lambda device, dtype: TritonScratch)
    values, gradients = run(torch.float32, temperature, rows_at_once, used, scale)
    torch.testing.assert_close(values, expected, rtol=3e-6, atol=1e-5)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert (gradient - reference).abs().max() <= 1e-5 * reference.abs().max()
        assert reference.abs().max() > 1e-3
    assert torch.equal(gradients[1][-PADDING:], torch.zeros(PADDING, WIDTH))


def test_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, expected_gradients = run(torch.bfloat16, 0.7, 3, "1111")
    monkeypatch.setattr(head, "scratch_of", lambda device, dtype: TritonScratch)
    values, gradients = run(torch.bfloat16, 0.7, 3, "1111")
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient - reference).abs().max() <= 1e-2 * reference.abs().max()


def test_the_gradient_takes_the_place_of_float32_logits_alone() -> None:
    """Beside them the interpreter's CPU takes each column's 8 factors in float32."""
    bytes_of = [
        TritonScratch.column_bytes(3, torch.empty(1, 8, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)
    ]
    assert bytes_of == [3 * 6 + 8 * 4, 3 * 4]


def test_a_cpu_keeps_to_torch() -> None:
    assert scratch_of(torch.device("cpu"), torch.float32) is TorchScratch
