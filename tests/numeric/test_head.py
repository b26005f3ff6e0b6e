"""Log-prob and entropy from logits, against float64 autograd through log_softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gppo_megatron.policy.megatron.head import VocabShard, token_statistics


def reference(logits: torch.Tensor, labels: torch.Tensor, vocab: int, temperature: float) -> tuple[torch.Tensor, ...]:
    log_probs = torch.log_softmax(logits[:, :vocab] / temperature, dim=1)
    return log_probs.gather(1, labels[:, None]).squeeze(1), -(log_probs.exp() * log_probs).sum(1)


def gradient_of(statistics: tuple[torch.Tensor, ...], logits: torch.Tensor) -> torch.Tensor:
    """Of a mix of both outputs with uneven weights, so that no error cancels."""
    rows = torch.arange(1.0, len(logits) + 1, dtype=logits.dtype)
    return torch.autograd.grad((rows * statistics[0]).sum() + (statistics[1] * rows.sqrt()).sum(), logits)[0]


@given(
    rows=st.integers(1, 5), vocab=st.integers(2, 9), padding=st.integers(0, 3),
    temperature=st.sampled_from([0.5, 1.0, 1.7]), scale=st.sampled_from([0.1, 3.0, 40.0]), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_in_float64(
    rows: int, vocab: int, padding: int, temperature: float, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab + padding, generator=generator, dtype=torch.float64) * scale).requires_grad_()
    labels = torch.randint(vocab, (rows,), generator=generator)
    ours = token_statistics(logits, labels, VocabShard(0, vocab, None), temperature)
    expected = reference(logits, labels, vocab, temperature)
    torch.testing.assert_close(tuple(ours), expected, rtol=1e-12, atol=1e-12)
    gradient = gradient_of(ours, logits)
    torch.testing.assert_close(gradient, gradient_of(expected, logits), rtol=1e-10, atol=1e-11)
    assert torch.equal(gradient[:, vocab:], torch.zeros(rows, padding, dtype=torch.float64))


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    token_statistics(logits, torch.tensor([0, 1, 2, 3]), VocabShard(0, 5, None), 1.0)
    assert torch.equal(logits, before)


def test_extreme_and_filtered_logits_stay_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [0.0, -torch.inf, 1.0]], requires_grad=True)
    statistics = token_statistics(logits, torch.tensor([1, 2]), VocabShard(0, 3, None), 1.0)
    torch.testing.assert_close(statistics.logprobs_N, torch.tensor([-6e4, -0.3132617]))
    torch.testing.assert_close(statistics.entropy_N, torch.tensor([0.0, 0.5822031]))
    assert gradient_of(statistics, logits).isfinite().all()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(3, 1000, generator=generator) * 5).bfloat16()
    labels = torch.tensor([1, 10, 100])
    ours = token_statistics(logits, labels, VocabShard(0, 1000, None), 1.0)
    expected = reference(logits.double(), labels, 1000, 1.0)
    assert ours.logprobs_N.dtype == torch.float32
    torch.testing.assert_close(ours.logprobs_N.double(), expected[0], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("start", "vocab", "columns", "padded"), [(0, 10, 5, 0), (5, 10, 5, 0), (5, 8, 5, 2), (5, 4, 5, 5)]
)
def test_which_columns_are_padding(start: int, vocab: int, columns: int, padded: int) -> None:
    assert VocabShard(start, vocab, None).padded_columns(columns) == padded
