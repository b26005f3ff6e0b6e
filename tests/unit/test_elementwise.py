"""Bit for bit what Megatron-Core computes, forward and backward."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.mlp import MLP

from gppo_megatron.policy.megatron.elementwise import gated, rotated

# Taken when tests are collected: before any of them adapts Megatron-Core.
MEGATRONS_ROTATION, MEGATRONS_MLP = rope_utils._apply_rotary_pos_emb_bshd, MLP.forward
DTYPES = (torch.float32, torch.bfloat16)


def tensors(*shapes: tuple[int, ...]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    yield from (torch.randn(shape, generator=generator) for shape in shapes)


def both(function: Callable[[torch.Tensor], torch.Tensor], t: torch.Tensor, gradient: torch.Tensor) -> tuple[Any, Any]:
    leaf = t.clone().requires_grad_()
    result = function(leaf)
    result.backward(gradient)
    return result.detach(), leaf.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 3])
def test_rotary_positions(dtype: torch.dtype, columns: int) -> None:
    assert MEGATRONS_ROTATION is not rotated
    t, gradient, freqs = tensors((57, columns, 4, 10), (57, columns, 4, 10), (57, 1, 1, 10))
    t, gradient = t.to(dtype), gradient.to(dtype)
    ours = both(lambda leaf: rotated(leaf, 9 * freqs), t, gradient)
    theirs = both(lambda leaf: MEGATRONS_ROTATION(leaf, 9 * freqs), t, gradient)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gated_unit(dtype: torch.dtype, scaled: bool) -> None:
    """Megatron's own `forward` and ours on the same linears, which here pass on what they get."""
    assert MEGATRONS_MLP is not gated
    config = SimpleNamespace(
        use_te_activation_func=False, bias_activation_fusion=False, gated_linear_unit=True, activation_func=F.silu,
        activation_func_clamp_value=None, glu_linear_offset=0.0,
    )  # fmt: skip
    through = SimpleNamespace(config=config, linear_fc1=lambda x: (x, None), linear_fc2=lambda x: (x, None))
    t, gradient, scale = tensors((57, 3, 26), (57, 3, 13), (57, 3))
    t, gradient = t.to(dtype), gradient.to(dtype)
    ours, theirs = (
        both(lambda leaf, own=forward: own(through, leaf, scale if scaled else None)[0], t, gradient)  # type: ignore[misc]
        for forward in (gated, MEGATRONS_MLP)
    )
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
