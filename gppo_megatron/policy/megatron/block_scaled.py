"""FP8 weights with a scale for every block, as Hugging Face files hold them: `X.weight` and `X.weight_scale_inv`."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from gppo_megatron.checkpoint.headers import HfTensor

SCALES = "_scale_inv"
BLOCK_SCALED = "float8_e4m3fn"
FLOATING = ("float64", "float32", "float16", "bfloat16")


def block_of(folder: Path) -> tuple[int, int] | None:
    """Rows and columns that share a scale, from the folder's config.json; None where it names no such scheme."""
    file = folder / "config.json"
    if not file.exists():
        return None
    scheme = json.loads(file.read_text(encoding="utf-8")).get("quantization_config") or {}
    size = scheme.get("weight_block_size") if scheme.get("quant_method") == "fp8" else None
    return (int(size[0]), int(size[1])) if size else None


def misfit(
    name: str, dtype: str, shape: Sequence[int], scales: HfTensor | None, block: tuple[int, int] | None
) -> str | None:
    """Why a quantized weight of this dtype and shape cannot be dequantized, in words; None where it can be."""
    if dtype != BLOCK_SCALED or scales is None or block is None:
        return (
            f"{name} holds {dtype} of a scheme that is not known; {name}{SCALES} and the quantization_config "
            "{quant_method: fp8, weight_block_size: [rows, columns]} of config.json are needed"
        )
    blocks = [math.ceil(size / part) for size, part in zip(shape, block, strict=False)]
    if len(shape) != 2 or list(scales.shape) != blocks or scales.dtype not in FLOATING:
        return (
            f"{name}{SCALES} has the shape {list(scales.shape)} and {scales.dtype}, but {name}, {list(shape)} "
            f"in blocks of {list(block)}, needs floating numbers of shape {blocks}"
        )
    return None


def dequantize(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float32: each block of `weight` [rows, columns] times its own number of `scales` [row blocks, column blocks].

    Memory: the result, and no more beside it than a row.
    """
    wide = weight.float()
    for rows, of_rows in zip(torch.split(wide, block[0]), scales.float(), strict=True):
        rows *= of_rows.repeat_interleave(block[1])[: wide.shape[1]]
    return wide
