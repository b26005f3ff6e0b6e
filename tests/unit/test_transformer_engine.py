"""What Megatron-Core passes to Transformer Engine, read from its source, against what a release of it takes.

Neither runs here: Transformer Engine needs a GPU. `transformer_engine_names.json` was read from the release's wheel.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import megatron.core
import pytest
import torch

from gppo_megatron.policy.megatron.arrangement import EndToEnd, Shares
from gppo_megatron.types import MicroBatch

CORE = Path(megatron.core.__path__[0])
NAMES: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("transformer_engine_names.json").read_text(encoding="utf-8")
)
WRAPPERS = {
    "TELinear": "Linear",
    "TELayerNormColumnParallelLinear": "LayerNormLinear",
    "TEDotProductAttention": "DotProductAttention",
    "TEGroupedLinear": "GroupedLinear",
    "TEDelayedScaling": "DelayedScaling",
}
"""Megatron-Core's class -> the one that it extends."""

NOT_TAKEN = {("TEDelayedScaling", "override_linear_precision")}
"""What the release does not take: with it `precision.fp8.recipe: delayed` is refused."""


def parsed(file: str) -> ast.Module:
    return ast.parse((CORE / file).read_text(encoding="utf-8"))


def wrapped() -> Iterator[tuple[str, str]]:
    """Each wrapper and the keywords that it passes to the class it extends."""
    for node in ast.walk(parsed("extensions/transformer_engine.py")):
        if isinstance(node, ast.ClassDef) and node.name in WRAPPERS:
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            inits = [call for call in calls if ast.unparse(call.func) == "super().__init__"]
            assert inits, f"{node.name} no longer extends a class of Transformer Engine"
            yield from ((node.name, word.arg) for call in inits for word in call.keywords if word.arg is not None)


def called(file: str) -> Iterator[tuple[str, str]]:
    """Each call of something in NAMES, by its last name, and a keyword of it."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("transformer_engine."):
            name = ast.unparse(node.func).split(".")[-1]
            yield from ((name, word.arg) for word in node.keywords if word.arg is not None and name in NAMES)


def test_the_layers_take_what_megatron_passes() -> None:
    passed = set(wrapped())
    assert {wrapper for wrapper, _ in passed} == set(WRAPPERS)
    unknown = {(wrapper, word) for wrapper, word in passed if word not in NAMES[WRAPPERS[wrapper]]}
    assert unknown <= NOT_TAKEN


def test_the_recipes_take_what_megatron_passes() -> None:
    passed = set(called("fp8_utils.py"))
    assert {"Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "fp8_autocast"} <= {n for n, _ in passed}
    assert all(word in NAMES[name] for name, word in passed)


@pytest.mark.parametrize("word", ["exp_avg_dtype", "exp_avg_sq_dtype", "master_weight_dtype", "use_decoupled_grad"])
def test_the_optimizer_takes_narrow_state(word: str) -> None:
    assert word in NAMES["FusedAdam"]


LENGTHS = (3, 9, 1)


@pytest.mark.parametrize(("context", "tensor", "unit"), [(1, 1, 1), (1, 2, 16), (2, 1, 1), (2, 2, 32), (4, 1, 16)])
def test_packed_bounds_are_what_thd_attention_takes(context: int, tensor: int, unit: int) -> None:
    """Whole sequences' bounds, int32, each of 2 x context slices, of which a process holds the first and the last that
    are not another's: the order in which Transformer Engine shares a sequence out."""
    tokens = torch.arange(1, 1 + sum(LENGTHS))
    zero = torch.zeros(len(tokens))
    batch = MicroBatch(tokens, tokens, tokens > 0, zero, zero, zero, tokens, zero, LENGTHS)
    for rank in range(context):
        grid = EndToEnd(Shares(context, rank, tensor, unit)).place(batch)
        packed = grid.packed
        assert packed is not None
        bounds = packed.cu_seqlens_q
        assert (packed.qkv_format, bounds.dtype, bounds.is_contiguous()) == ("thd", torch.int32, True)
        assert torch.equal(packed.cu_seqlens_kv, bounds)
        padded = bounds.diff().tolist()
        assert (int(bounds[0]), len(padded)) == (0, len(LENGTHS))
        assert all(length >= real and length % (2 * context if context > 1 else 1) == 0
                   for length, real in zip(padded, LENGTHS, strict=True))  # fmt: skip
        assert packed.max_seqlen_q == packed.max_seqlen_kv == max(padded)
        assert int(bounds[-1]) == grid.length * context
        assert grid.length % (tensor * unit) == 0
        expected = []
        for real, length, start in zip(LENGTHS, padded, (0, 3, 12), strict=True):
            whole = torch.cat([tokens[start : start + real], torch.zeros(length - real, dtype=torch.int64)])
            parts = whole.chunk(2 * context) if context > 1 else (whole,)
            mine = (rank, 2 * context - 1 - rank) if context > 1 else (0,)
            expected += [parts[part] for part in mine]
        assert grid.tokens_BS[0].tolist() == torch.cat(expected).tolist()


def test_attention_takes_packed_sequences() -> None:
    """The bounds of `arrangement.Grid.packed`, by the names under which Megatron-Core hands them on."""
    packed = {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"}
    assert packed <= set(NAMES["DotProductAttention.forward"])
