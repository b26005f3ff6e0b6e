"""Bytes of the fused head at T=8192, H=4096, V=151,936 in bfloat16, counted on tensors without storage."""

import pytest
import torch

from benchmarks.head_bytes import GIB, LiveBytes, Sizes, growth, peak_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor. is deprecated:FutureWarning")

ROWS, A_ROW = 8192, 32
"""T, and the most bytes that one more row may add."""


@pytest.mark.parametrize(("shards", "rows", "limit_gib"), [(1, 2048, 0.40), (8, ROWS, 0.08)])
def test_the_peak_of_all_statistics_with_all_gradients(shards: int, rows: int, limit_gib: float) -> None:
    """Of one shard fewer rows are counted, to save time, and the others taken at the most they may add."""
    peak = peak_bytes(Sizes(rows, shards=shards)) + (ROWS - rows) * A_ROW
    assert 0.06 < peak / GIB <= limit_gib


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_grows_with_the_rows(shards: int, dtype: torch.dtype) -> None:
    """The four statistics of a row and what of them is kept for the gradient."""
    assert 16 <= growth(Sizes(4096, hidden=64, vocab=2**15, shards=shards, dtype=dtype)) <= A_ROW


def test_the_count_itself() -> None:
    before = torch.zeros(1000)
    with LiveBytes() as live:
        live.leave_out(before)
        first = torch.zeros(100)
        before.add_(1)
        second = first + 1
        del first
        third = second * 2
        view = third[:50].mul_(3)
    assert (view.sum(), live.peak) == (300, 2 * 400)
