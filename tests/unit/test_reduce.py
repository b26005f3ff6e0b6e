import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gppo_megatron.objective.presets import Aggregation
from gppo_megatron.objective.reduce import AGGREGATIONS, token_shares, total

MASK_T = torch.tensor([False, True, True, False, False, True, False, False])
LENGTHS = (4, 2, 2)


def test_table_holds_the_configurable_names() -> None:
    assert tuple(AGGREGATIONS) == get_args(Aggregation)


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("token_mean", [0, 1 / 10, 1 / 10, 0, 0, 1 / 10, 0, 0]),
        ("sequence_mean", [0, 1 / 8, 1 / 8, 0, 0, 1 / 4, 0, 0]),
        ("constant_length", [0, 1 / 20, 1 / 20, 0, 0, 1 / 20, 0, 0]),
    ],
)
def test_shares_by_hand(aggregation: Aggregation, want: list[float]) -> None:
    """Globally 10 tokens in 4 sequences, constant length 5; the last sequence here has no loss."""
    share_T = token_shares(MASK_T, LENGTHS, 10, 4, aggregation, 5)
    assert share_T.dtype == torch.float32
    torch.testing.assert_close(share_T, torch.tensor(want, dtype=torch.float32), rtol=1e-7, atol=0)


sequences = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-3, 3)), min_size=1, max_size=6), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(sequences, st.lists(st.integers(0, 3), min_size=8, max_size=8), st.sampled_from(get_args(Aggregation)))
def test_any_split_into_micro_batches_has_the_same_total(
    batch: list[list[tuple[bool, float]]], places: list[int], aggregation: Aggregation
) -> None:
    losses = [[loss for masked_in, loss in sequence if masked_in] for sequence in batch]
    counted = [sequence for sequence in losses if sequence]
    tokens = sum(map(len, counted))
    want = {
        "token_mean": lambda: sum(map(sum, counted)) / tokens,
        "sequence_mean": lambda: sum(sum(sequence) / len(sequence) for sequence in counted) / len(counted),
        "constant_length": lambda: sum(map(sum, counted)) / (7 * len(counted)),
    }[aggregation]

    got = 0.0
    for place in range(4):
        part = [sequence for sequence, where in zip(batch, places, strict=False) if where == place]
        mask_T = torch.tensor([masked_in for sequence in part for masked_in, _ in sequence], dtype=torch.bool)
        loss_T = torch.tensor([loss for sequence in part for _, loss in sequence], dtype=torch.float32)
        share_T = token_shares(mask_T, tuple(map(len, part)), tokens, len(counted), aggregation, 7)
        got += total(loss_T, share_T).item()
    assert got == pytest.approx(want() if counted else 0.0, abs=1e-5)


def test_total_ignores_what_has_no_share() -> None:
    loss_T = torch.tensor([math.nan, 2.0, math.inf, -4.0], requires_grad=True)
    value = total(loss_T, torch.tensor([0.0, 0.5, 0.0, 0.25]))
    assert value.item() == 0.0
    (gradient_T,) = torch.autograd.grad(value, loss_T)
    assert gradient_T.tolist() == [0.0, 0.5, 0.0, 0.25]


def test_total_sums_low_precision_losses_in_float32() -> None:
    loss_T = torch.ones(1000, dtype=torch.bfloat16)
    value = total(loss_T, torch.full((1000,), 1 / 1000))
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(1.0, rel=1e-5)


def test_a_batch_without_loss_has_a_zero_total_with_a_graph() -> None:
    loss_T = torch.zeros(4, requires_grad=True)
    for aggregation in get_args(Aggregation):
        share_T = token_shares(torch.zeros(4, dtype=torch.bool), (1, 3), 0, 0, aggregation, 7)
        value = total(loss_T, share_T)
        assert value.requires_grad
        assert value.item() == 0.0


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="the sequences hold 6 tokens, but the mask 8"):
        token_shares(MASK_T, (4, 2), 10, 4, "token_mean")
    with pytest.raises(ValueError, match="3 loss tokens in 2 sequences"):
        token_shares(MASK_T, LENGTHS, 2, 4, "token_mean")
    with pytest.raises(ValueError, match="3 loss tokens in 2 sequences"):
        token_shares(MASK_T, LENGTHS, 10, 1, "sequence_mean")
    with pytest.raises(ValueError, match="constant_length must be at least 1, got None"):
        token_shares(MASK_T, LENGTHS, 10, 4, "constant_length")
