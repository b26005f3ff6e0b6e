"""The section `precision:`: the numbers that weights and matrix products are made of."""

from dataclasses import dataclass
from typing import Literal

Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]

WIDTHS: dict[Recipe, int] = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
"""recipe -> what the rows and columns of an FP8 matrix product are multiples of."""


@dataclass(frozen=True)
class Fp8:
    """Matrix products of the layers in FP8, by Transformer Engine; head, router, norms and loss are never in it.

    recipe: how scales are chosen: from past maxima (delayed), for each tensor, for blocks of 128, or of 32 (mxfp8).
    format: e4m3, or hybrid, which has gradients in e5m2.
    parameters: the weights of these products are kept in FP8 alone, beside the optimizer's own.
    first_layers, last_layers: how many compute in bfloat16.
    """

    recipe: Recipe = "tensorwise"
    format: Literal["hybrid", "e4m3"] = "hybrid"
    parameters: bool = False
    first_layers: int = 0
    last_layers: int = 0


@dataclass(frozen=True)
class Precision:
    """dtype: of weights and of what layers compute. fp8: null for none."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    fp8: Fp8 | None = None

    def __str__(self) -> str:
        return self.dtype if self.fp8 is None else f"{self.dtype} with FP8 {self.fp8.recipe} {self.fp8.format}"


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer keeps of each parameter, in which numbers; anything but float32 takes Transformer Engine.

    mean, square: AdamW's two averages; fp8 and float16 with a scale for each tensor.
    weights: the copy that steps are added to. Gradients are always added up in float32.
    """

    mean: Literal["float32", "bfloat16", "float16", "fp8"] = "float32"
    square: Literal["float32", "bfloat16", "float16", "fp8"] = "float32"
    weights: Literal["float32", "float16"] = "float32"

    @property
    def plain(self) -> bool:
        return self == OptimizerState()
