"""The fused head against float64 autograd through log_softmax of all logits."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gppo_megatron.policy.megatron import head
from gppo_megatron.policy.megatron.head import TokenStatistics, VocabShard, tile_that_fits, token_statistics

WHOLE = VocabShard(0, 3, None)
LOGITS = torch.eye(3)
"""As the head's weight: hidden rows are then the logits themselves."""


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab: int, temperature: float
) -> TokenStatistics:
    logits = hidden @ weight[:vocab].t() / temperature
    log_probs = torch.log_softmax(logits, dim=1)
    return TokenStatistics(
        log_probs.gather(1, labels[:, None]).squeeze(1),
        torch.logsumexp(logits, 1),
        -(log_probs.exp() * log_probs).sum(1),
        log_probs.exp().square().sum(1),
        logits.amax(1),
        log_probs.amax(1),
    )


def gradients_of(statistics: TokenStatistics, *inputs: torch.Tensor, used: str = "1111") -> tuple[torch.Tensor, ...]:
    """Of a mix of the statistics marked in `used`, with uneven weights, so that no error cancels."""
    rows = torch.arange(1.0, len(statistics.logprobs_N) + 1, dtype=statistics.logprobs_N.dtype)
    weights = (rows, rows.sqrt() - 2, rows.square() / 7 - 1, 3 - rows)
    parts = zip(weights, statistics[:4], used, strict=True)
    loss = sum((weight * value).sum() for weight, value, use in parts if use == "1")
    return torch.autograd.grad(loss, inputs)


def problem(
    rows: int, columns: int, width: int, scale: float, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden rows and a weight that both want a gradient; `scale` is about the size of the logits."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale / math.sqrt(width)
    weight = torch.randn(columns, width, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


@given(
    rows=st.integers(1, 7), vocab=st.integers(2, 9), padding=st.integers(0, 3), width=st.integers(1, 5),
    rows_at_once=st.sampled_from([1, 3, None]), scratch=st.sampled_from([1, 100, 2**25]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]), scale=st.sampled_from([0.1, 3.0, 40.0]),
    used=st.sampled_from(["1111", "1000", "0100", "0010", "0001", "1010"]), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_values_and_gradients_in_float64(
    rows: int, vocab: int, padding: int, width: int, rows_at_once: int | None, scratch: int, temperature: float,
    scale: float, used: str, seed: int,
) -> None:  # fmt: skip
    hidden, weight = problem(rows, vocab + padding, width, scale, seed)
    labels = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    with mock.patch.object(head, "SCRATCH_BYTES", scratch):
        ours = token_statistics(hidden, weight, labels, VocabShard(0, vocab, None), temperature, rows_at_once)
    expected = reference(hidden, weight, labels, vocab, temperature)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)
    of_hidden, of_weight = gradients_of(ours, hidden, weight, used=used)
    torch.testing.assert_close(
        (of_hidden, of_weight), gradients_of(expected, hidden, weight, used=used), rtol=1e-9, atol=1e-10
    )
    assert torch.equal(of_weight[vocab:], torch.zeros(padding, width, dtype=torch.float64))


@given(
    rows=st.integers(1, 6), vocab=st.integers(1, 9), scale=st.sampled_from([0.0, 1.0, 30.0]), seed=st.integers(0, 1000)
)
@settings(max_examples=60, deadline=None)
def test_statistics_keep_their_bounds(rows: int, vocab: int, scale: float, seed: int) -> None:
    hidden, weight = problem(rows, vocab, 4, scale, seed)
    labels = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(seed))
    ours = token_statistics(hidden, weight, labels, VocabShard(0, vocab, None), 1.0, 2)
    assert ours.logprobs_N.max() <= 1e-12
    assert -1e-12 <= ours.entropy_N.min() <= ours.entropy_N.max() <= math.log(vocab) + 1e-12
    assert 1 / vocab - 1e-12 <= ours.squares_N.min() <= ours.squares_N.max() <= 1 + 1e-12
    # By Jensen's inequality, with equality for a uniform distribution.
    assert (ours.squares_N - (-ours.entropy_N).exp()).min() >= -1e-12


def test_float32_is_close_to_float64() -> None:
    hidden, weight = problem(40, 501, 32, 4.0, 3, torch.float32)
    labels = torch.randint(490, (40,), generator=torch.Generator().manual_seed(0))
    ours = token_statistics(hidden, weight, labels, VocabShard(0, 490, None), 0.7, 16)
    doubles = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = reference(*doubles, labels, 490, 0.7)
    pairs = zip(
        (*ours, *gradients_of(ours, hidden, weight)), (*expected, *gradients_of(expected, *doubles)), strict=True
    )
    for value, double in pairs:
        assert value.dtype == torch.float32
        assert (value - double).abs().max() <= 2e-6 * double.abs().max()


def test_of_bfloat16_inputs_only_the_gradients_are_rounded() -> None:
    """Once, to the inputs' type; logits and sums are float32."""
    hidden, weight = problem(3, 1000, 8, 5.0, 2, torch.bfloat16)
    labels = torch.tensor([1, 10, 100])
    ours = token_statistics(hidden, weight, labels, VocabShard(0, 1000, None), 1.0)
    doubles = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = reference(*doubles, labels, 1000, 1.0)
    for value, double in zip(ours, expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), double, rtol=2e-6, atol=1e-5)
    for gradient, double in zip(gradients_of(ours, hidden, weight), gradients_of(expected, *doubles), strict=True):
        assert gradient.dtype == torch.bfloat16
        assert (gradient - double).abs().max() <= 2**-8 * double.abs().max()


def test_the_gradient_of_a_bfloat16_weight_is_added_up_in_float32() -> None:
    """1,000 equal rows: a sum of bfloat16 stops growing at 256 times a term."""
    hidden = torch.ones(1000, 1, dtype=torch.bfloat16)
    weight = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1000, dtype=torch.int64)
    ours = token_statistics(hidden, weight, labels, WHOLE, 1.0, rows_at_once=1)
    (gradient,) = torch.autograd.grad(ours.logprobs_N.sum(), weight)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.float().squeeze(1) / 1000, torch.tensor([2, -1, -1]) / 3, rtol=2**-8, atol=0)


def test_the_inputs_are_left_as_they_were() -> None:
    hidden, weight = problem(4, 7, 3, 1.0, 0)
    labels = torch.tensor([0, 1, 2, 3])
    before = [tensor.detach().clone() for tensor in (hidden, weight, labels)]
    ours = token_statistics(hidden, weight, labels, VocabShard(0, 5, None), 0.5)
    outputs = [value.detach().clone() for value in ours]
    gradients_of(ours, hidden, weight)
    assert all(map(torch.equal, before, (hidden, weight, labels)))
    assert all(map(torch.equal, outputs, ours))


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[3e4, -3e4, 0.0]], requires_grad=True)
    statistics = token_statistics(hidden, LOGITS, torch.tensor([1]), WHOLE, 1.0)
    expected = TokenStatistics(*map(torch.tensor, ([-6e4], [3e4], [0.0], [1.0], [3e4], [0.0])))
    torch.testing.assert_close(statistics, expected, rtol=0, atol=0)
    assert gradients_of(statistics, hidden)[0].isfinite().all()


def test_a_row_that_is_certain_to_the_last_bit() -> None:
    hidden = torch.tensor([[300.0, 0.0, -50.0]], requires_grad=True)
    statistics = token_statistics(hidden, LOGITS, torch.tensor([0]), WHOLE, 1.0)
    assert [value.item() for value in statistics] == [0, 300, 0, 1, 300, 0]
    for used, gradient in {"1011": [[0, 0, 0]], "0100": [[-1, 0, 0]]}.items():
        statistics = token_statistics(hidden, LOGITS, torch.tensor([0]), WHOLE, 1.0)
        assert gradients_of(statistics, hidden, used=used)[0].tolist() == gradient


def test_how_far_from_certain_is_not_rounded_away() -> None:
    """1 - p is 8.3e-7, of logits whose log-sum-exp is 1,000 in float32."""
    hidden = torch.tensor([[1000.0, 986.0, 0.0]], requires_grad=True)
    statistics = token_statistics(hidden, LOGITS, torch.tensor([0]), WHOLE, 1.0)
    gradient = gradients_of(statistics, hidden, used="1000")[0][0]
    assert gradient.tolist() == pytest.approx([8.315e-7, -8.315e-7, 0], rel=0.1)
    assert statistics.logprobs_N.item() == pytest.approx(-8.315e-7, rel=0.1)


def test_no_rows() -> None:
    hidden, weight = problem(0, 5, 3, 1.0, 0)
    statistics = token_statistics(hidden, weight, torch.zeros(0, dtype=torch.int64), VocabShard(0, 5, None), 1.0)
    assert [value.shape for value in statistics] == [(0,)] * 6
    of_hidden, of_weight = gradients_of(statistics, hidden, weight)
    assert of_hidden.shape == (0, 3)
    assert torch.equal(of_weight, torch.zeros(5, 3, dtype=torch.float64))


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_has_no_gradient_and_changes_none(frozen: int) -> None:
    inputs = problem(4, 6, 3, 2.0, 1)
    labels = torch.tensor([5, 0, 3, 3])
    expected = gradients_of(reference(*inputs, labels, 6, 1.0), *inputs)[1 - frozen]
    inputs[frozen].requires_grad_(False)
    ours = token_statistics(*inputs, labels, VocabShard(0, 6, None), 1.0, 3)
    torch.testing.assert_close(gradients_of(ours, inputs[1 - frozen])[0], expected)


def test_a_second_backward_is_refused() -> None:
    hidden, weight = problem(2, 3, 2, 1.0, 0)
    loss = token_statistics(hidden, weight, torch.tensor([0, 1]), WHOLE, 1.0).logprobs_N.sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="head a second time: its buffers are freed .* call token_statistics again"):
        loss.backward()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    hidden, weight = problem(2, 3, 2, 1.0, 0)
    loss = token_statistics(hidden, weight, torch.tensor([0, 1]), WHOLE, 1.0).entropy_N.square().sum()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class MostRows(TorchDispatchMode):
    """The most rows of any tensor with `columns` columns that an operation made."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[1] == self.columns:
            self.rows = max(self.rows, len(result))
        return result


@pytest.mark.parametrize(("rows_at_once", "rows"), [(5, 5), (None, 64)])
def test_the_logits_never_exist_at_once(rows_at_once: int | None, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """31 columns are computed as four times 7 and 3."""
    monkeypatch.setattr(head, "SCRATCH_BYTES", 2 * 8 * 7 * rows)  # two buffers of float64
    hidden, weight = problem(64, 31, 4, 1.0, 0)
    labels = torch.zeros(64, dtype=torch.int64)
    with MostRows(7) as forward, MostRows(31) as whole:
        ours = token_statistics(hidden, weight, labels, VocabShard(0, 31, None), 1.0, rows_at_once)
    with MostRows(7) as backward, whole:
        gradients_of(ours, hidden, weight)
    assert (forward.rows, backward.rows, whole.rows) == (rows, rows, 0)


@pytest.mark.parametrize(
    ("rows", "dtype", "columns"),
    [(1024, torch.float32, 4096), (1024, torch.bfloat16, 1365), (1024, torch.float64, 2048), (10**9, torch.float32, 1)],
)
def test_how_many_columns_fit(rows: int, dtype: torch.dtype, columns: int) -> None:
    """Of a 16-bit weight each column takes 4 x 4,096 bytes more."""
    assert (head.SCRATCH_BYTES, head.ROWS_AT_ONCE) == (32 * 2**20, 1024)
    assert tile_that_fits(rows, torch.empty(1, 4096, dtype=dtype)) == (rows, columns)


@pytest.mark.parametrize(
    ("start", "vocab", "columns", "padded"), [(0, 10, 5, 0), (5, 10, 5, 0), (5, 8, 5, 2), (5, 4, 5, 5)]
)
def test_which_columns_are_padding(start: int, vocab: int, columns: int, padded: int) -> None:
    assert VocabShard(start, vocab, None).padded_columns(columns) == padded
