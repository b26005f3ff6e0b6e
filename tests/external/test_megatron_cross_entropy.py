"""The head's log-probs against Megatron-Core's vocab-parallel cross entropy, which is float32 whatever it is given."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

from gppo_megatron.policy.megatron.head import VocabShard, token_statistics

ROWS, VOCAB, PADDING = 40, 501, 11
ROUNDING = {torch.float64: 2e-6, torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Relative, of a gradient with respect to logits of that type: one in bfloat16 has 8 bits."""


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [0.5, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_log_probs_and_gradient(dtype: torch.dtype, temperature: float, scale: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logits_NV = (torch.randn(ROWS, VOCAB + PADDING, generator=random) * scale).to(dtype).requires_grad_()
    labels_N = torch.randint(VOCAB, (ROWS,), generator=random)
    labels_N[:3] = logits_NV[:3, :VOCAB].argmax(1)
    weights_N = torch.randn(ROWS, generator=random)

    group = parallel_state.get_tensor_model_parallel_group()
    # Through an identity for a head, hidden rows are logits.
    head_VV = torch.eye(VOCAB + PADDING, dtype=dtype)
    ours_N = token_statistics(logits_NV, head_VV, labels_N, VocabShard(0, VOCAB, group), temperature).logprobs_N
    # Megatron-Core has neither a temperature nor a padded vocabulary, and writes into its argument.
    scaled_NV = logits_NV.float()[:, :VOCAB] / temperature
    theirs_N = -vocab_parallel_cross_entropy(scaled_NV[:, None, :].clone(), labels_N[:, None]).squeeze(1)
    torch.testing.assert_close(ours_N.float(), theirs_N, rtol=1e-6, atol=4e-6)

    ours_NV, theirs_NV = (
        torch.autograd.grad((weights_N * values_N).sum(), logits_NV)[0] for values_N in (ours_N, theirs_N)
    )
    # p - 1 at a label cancels where p is close to 1.
    torch.testing.assert_close(ours_NV, theirs_NV, rtol=ROUNDING[dtype], atol=2e-7)
    assert ours_NV.abs().max() > 0.1
    assert (ours_NV[:, VOCAB:] == 0).all()
