"""Checksums as a server of SGLang 0.5.23 computes them."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gppo_megatron.fused_checksums import FusedChecksums, fused_checksums, fused_name

LAYER = "model.layers.3"


def first_bytes(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        (f"{LAYER}.self_attn.q_proj.bias", (f"{LAYER}.self_attn.qkv_proj.bias", 0, 3)),
        (f"{LAYER}.self_attn.v_proj.weight", (f"{LAYER}.self_attn.qkv_proj.weight", 2, 3)),
        (f"{LAYER}.mlp.up_proj.weight", (f"{LAYER}.mlp.gate_up_proj.weight", 1, 2)),
        (f"{LAYER}.self_attn.q_norm.weight", (f"{LAYER}.self_attn.q_norm.weight", 0, 1)),
    ],
)
def test_names(name: str, fused: tuple[str, int, int]) -> None:
    assert fused_name(name) == fused


@given(st.permutations(["q", "k", "v", "gate", "up", "o"]))
def test_parts_in_any_order(order: list[str]) -> None:
    parts = {name: torch.full((2, 3), float(place)) for place, name in enumerate(["q", "k", "v", "gate", "up", "o"])}
    sums = fused_checksums((f"{name}_proj.weight", parts[name]) for name in order)
    assert sums == {
        "qkv_proj.weight": first_bytes(parts["q"], parts["k"], parts["v"]),
        "gate_up_proj.weight": first_bytes(parts["gate"], parts["up"]),
        "o_proj.weight": first_bytes(parts["o"]),
    }


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_row_a_token_is_filled_up_with_zeros(name: str) -> None:
    rows = torch.arange(21 * 2, dtype=torch.bfloat16).reshape(21, 2)
    whole = torch.cat([rows, torch.zeros(43, 2, dtype=torch.bfloat16)]).view(torch.int16)
    assert fused_checksums([(name, rows)]) == {name: first_bytes(whole)}
    assert fused_checksums([(name, rows[:0])]) == {name: first_bytes()}


def test_one_bit_shows() -> None:
    tensor = torch.ones(4)
    before = fused_checksums([("model.norm.weight", tensor)])
    tensor[2] = torch.nextafter(tensor[2], torch.tensor(2.0))
    assert fused_checksums([("model.norm.weight", tensor)]) != before


def test_a_missing_and_a_repeated_part_are_errors() -> None:
    checksums = FusedChecksums()
    checksums.add("q_proj.weight", torch.ones(2))
    with pytest.raises(ValueError, match=r"parts are missing of qkv_proj\.weight"):
        checksums.finished()
    with pytest.raises(ValueError, match=r"q_proj\.weight came twice"):
        checksums.add("q_proj.weight", torch.ones(2))
