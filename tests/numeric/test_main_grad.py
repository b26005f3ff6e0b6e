"""The head's weight under Megatron's data parallelism: its gradient is added up in `main_grad`, and nowhere twice."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from gppo_megatron.policy.megatron import head
from gppo_megatron.policy.megatron.head import VocabShard, token_statistics
from tests.single_process import world_of_one

VOCAB, PADDED, WIDTH, MICRO_BATCHES = 11, 14, 6, 3


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


class Model(torch.nn.Module):
    """An embedding, a bend and the head; tied, the two share one weight."""

    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        table = torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        self.embedding = torch.nn.Parameter(table)
        self.head = self.embedding if tied else torch.nn.Parameter(table.flip(1).clone())

    def forward(self, tokens_N: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        hidden_NH = torch.tanh(F.embedding(tokens_N, self.embedding))
        ours = token_statistics(hidden_NH, self.head, labels_N, VocabShard(0, VOCAB, None), 0.7, rows_at_once=4)
        return (ours.logprobs_N + 0.5 * ours.entropy_N - 0.3 * ours.squares_N).sum()


def expected_gradients(model: Model) -> dict[str, torch.Tensor]:
    """Of all micro-batches, by autograd through all logits in float64."""
    table = model.embedding.detach().double().requires_grad_()
    head = table if model.head is model.embedding else model.head.detach().double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for tokens_N, labels_N in micro_batches():
        log_probs_NV = torch.log_softmax(torch.tanh(table[tokens_N]) @ head[:VOCAB].t() / 0.7, 1)
        probs_NV = log_probs_NV.exp()
        entropy_N = -(probs_NV * log_probs_NV).sum(1)
        loss = loss + (log_probs_NV[range(9), labels_N] + 0.5 * entropy_N - 0.3 * probs_NV.square().sum(1)).sum()
    loss.backward()
    return {name: value.grad for name, value in (("embedding", table), ("head", head)) if value.grad is not None}


def micro_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randint(VOCAB, (9,), generator=generator), torch.randint(VOCAB, (9,), generator=generator))
        for _ in range(MICRO_BATCHES)
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_gradient_of_several_micro_batches(
    overlap: bool, tied: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "SCRATCH_BYTES", 200)  # 6 or 5 columns of 4 rows at a time
    model = Model(tied, dtype)
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap), model
    )
    for _ in range(2):  # a second step starts from zero again
        ddp.zero_grad_buffer()
        *first, last = micro_batches()
        with ddp.no_sync():
            for batch in first:
                ddp(*batch).backward()
        ddp(*last).backward()
        ddp.finish_grad_sync()
    for name, gradient in expected_gradients(model).items():
        main_grad = model.get_parameter(name).main_grad
        assert main_grad.dtype == torch.float32
        assert (main_grad - gradient).abs().max() <= tolerance * gradient.abs().max(), name
        assert gradient.abs().max() > 1
        assert model.get_parameter(name).grad is None


def test_many_small_gradients_of_a_bfloat16_weight() -> None:
    """1,000 micro-batches of one row each: a sum in bfloat16 would stop growing at 256 times a term."""
    weight = torch.nn.Parameter(torch.zeros(3, 1, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(3, 1)  # type: ignore[attr-defined]
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(1000):
        ours = token_statistics(hidden, weight, torch.zeros(1, dtype=torch.int64), VocabShard(0, 3, None), 1.0)
        ours.logprobs_N.sum().backward()
    expected = torch.tensor([[2.0], [-1.0], [-1.0]]) * 1000 / 3
    torch.testing.assert_close(weight.main_grad, expected, rtol=1e-5, atol=0)
    assert weight.grad is not None
    assert (weight.grad.is_sparse, weight.grad._nnz()) == (True, 0), "autograd has nothing to add, and no memory for it"


def test_a_main_grad_of_few_bits_is_not_summed_into() -> None:
    """It gets the float32 sum of all chunks, rounded once, by DDP."""
    weight = torch.nn.Parameter(torch.zeros(3, 1, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(3, 1, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    hidden = torch.ones(1000, 1, dtype=torch.bfloat16)
    shard, labels = VocabShard(0, 3, None), torch.zeros(1000, dtype=torch.int64)
    token_statistics(hidden, weight, labels, shard, 1.0, rows_at_once=1).logprobs_N.sum().backward()
    assert torch.equal(weight.main_grad, torch.zeros(3, 1, dtype=torch.bfloat16))
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[0].float() / 1000, torch.tensor([2 / 3]), rtol=2**-8, atol=0)
