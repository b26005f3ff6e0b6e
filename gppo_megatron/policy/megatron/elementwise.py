"""Rotary positions and the gated unit of an MLP, bit for bit as Megatron-Core computes them, with fewer copies."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

silu_backward = torch.ops.aten.silu_backward.grad_input


def rotated(t: torch.Tensor, freqs: torch.Tensor, *_: Any, mscale: float = 1.0, **__: Any) -> torch.Tensor:
    """Stands for Megatron's `_apply_rotary_pos_emb_bshd`: t [..., D] turned by the angles freqs, of the same D."""
    assert freqs.shape[-1] == t.shape[-1], "a head is rotated as a whole"
    cos, sin = ((function(freqs) * mscale).to(t.dtype) for function in (torch.cos, torch.sin))
    return _Rotation.apply(t, cos, sin)  # type: ignore[no-any-return,no-untyped-call]


class _Rotation(torch.autograd.Function):
    """With the halves of t, (a, b) -> (a cos - b sin, b cos + a sin)."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        turned, half = t * cos, t.shape[-1] // 2
        turned[..., :half] -= t[..., half:] * sin[..., :half]
        turned[..., half:] += t[..., :half] * sin[..., half:]
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back, half = gradient * cos, gradient.shape[-1] // 2
        back[..., :half] += gradient[..., half:] * sin[..., half:]
        back[..., half:] -= gradient[..., :half] * sin[..., :half]
        return back, None, None


def gated(
    self: Any, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Stands for the `forward` of Megatron's MLP where it has a gate and no bias: [..., H] -> [..., H].

    per_token_scale: [...], of an expert's tokens.
    """
    gate_up, _ = self.linear_fc1(hidden_states)
    inner = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
    if per_token_scale is not None:
        inner = (inner * per_token_scale.unsqueeze(-1)).to(inner.dtype)
    output, _ = self.linear_fc2(inner)
    return output, None


class _SwiGlu(torch.autograd.Function):
    """[..., 2 F] -> [..., F]: with the halves (gate, up), silu(gate) x up."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        opened = silu(gate)
        ctx.save_for_backward(gate_up, opened)
        return opened * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gate_up, opened = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        back = torch.empty_like(gate_up)
        of_gate, of_up = back.chunk(2, dim=-1)
        torch.mul(gradient, opened, out=of_up)
        silu_backward(gradient * up, gate, grad_input=of_gate)
        return back
