"""What the head does with one tile of the logits, some rows by some columns: their sums and their gradient.

C: rows of a tile, V: its columns, H: hidden size.
"""

import importlib
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def product(first_MK: torch.Tensor, second_KN: torch.Tensor, out_MN: torch.Tensor, keep: bool = False) -> torch.Tensor:
    """first @ second into `out_MN`, float32 or wider; keep: added to what is there. Nothing is rounded to 16 bits.

    Of a 16-bit `second` a CPU takes both factors in float32, and a GPU takes both as they come, a wider first one
    rounded: its units have 16-bit factors and a float32 sum. Unverified on hardware.
    """
    if second_KN.is_cuda and second_KN.dtype != out_MN.dtype:
        first_MK = first_MK.to(second_KN.dtype)
        return torch.addmm(out_MN, first_MK, second_KN, beta=int(keep), out_dtype=out_MN.dtype, out=out_MN)
    return out_MN.addmm_(first_MK.to(out_MN.dtype), second_KN.to(out_MN.dtype), beta=int(keep))


def widened_bytes(weight_VH: torch.Tensor) -> int:
    """What `product` takes for one column of a 16-bit weight on a CPU."""
    dtype = statistics_dtype(weight_VH.dtype)
    return 0 if weight_VH.is_cuda or weight_VH.dtype == dtype else weight_VH.shape[1] * dtype.itemsize


class TileShape(NamedTuple):
    rows: int
    columns: int


@dataclass(frozen=True)
class Columns:
    """Some of the shard's columns, none of them padding, and where the labels fall among them."""

    weight_VH: torch.Tensor
    labels_N: torch.Tensor
    start: int
    temperature: float
    tile: TileShape

    def row_chunks(self) -> Iterator[slice]:
        """None where every column is padding: such a rank adds nothing."""
        if len(self.weight_VH):
            for first in range(0, len(self.labels_N), self.tile.rows):
                yield slice(first, first + self.tile.rows)

    def column_chunks(self) -> "Iterator[tuple[slice, Columns]]":
        """Which of these columns, and they alone."""
        for first in range(0, len(self.weight_VH), self.tile.columns):
            some = slice(first, min(first + self.tile.columns, len(self.weight_VH)))  # no padding after the last
            yield some, replace(self, weight_VH=self.weight_VH[some], start=self.start + first)

    def mine(self, rows: slice) -> torch.Tensor:
        """Whether each label is among these columns: bool [C]."""
        local_C = self.labels_N[rows] - self.start
        return (local_C >= 0) & (local_C < len(self.weight_VH))

    def places(self, rows: slice) -> torch.Tensor:
        """The labels' columns, 0 where they are elsewhere: int64 [C]."""
        return torch.where(self.mine(rows), self.labels_N[rows] - self.start, 0)


@dataclass(frozen=True)
class OutputGradients:
    """Of the loss with respect to a chunk's statistics, and what was kept of its rows.

    With p a row's probabilities: d logprob = 1[label] - p, d logsumexp = p, d entropy = -p (log p + entropy),
    d squares = 2 p (p - squares). label_C: of each label's log-prob. constant_C: of d, all that is one number a
    row. None for a statistic the loss does not use. log p of a token is (logit - top_logits) + top_logprobs.
    """

    label_C: torch.Tensor
    constant_C: torch.Tensor
    entropy_C: torch.Tensor | None
    squares_C: torch.Tensor | None
    top_logits_C: torch.Tensor
    top_logprobs_C: torch.Tensor

    @classmethod
    def of(
        cls,
        gradients: tuple[torch.Tensor | None, ...],
        saved: tuple[torch.Tensor, ...],
        rows: slice,
    ) -> "OutputGradients":
        """gradients: in the order of TokenStatistics; saved: top logits, top log-probs, entropy, squares."""
        top_logits_C, top_logprobs_C, entropy_C, squares_C = (values_N[rows] for values_N in saved)
        given = [None if gradient_N is None else gradient_N[rows] for gradient_N in gradients[:4]]
        zeros_C = torch.zeros_like(entropy_C)
        label_C, logsumexp_C, of_entropy_C, of_squares_C = (
            zeros_C if gradient_C is None else gradient_C for gradient_C in given
        )
        constant_C = logsumexp_C - label_C - of_entropy_C * entropy_C - 2 * of_squares_C * squares_C
        return cls(label_C, constant_C, given[2], given[3], top_logits_C, top_logprobs_C)


class Scratch(Protocol):
    """The buffers of one tile after another, and the passes over a tile's logits."""

    @staticmethod
    def column_bytes(rows: int, weight_VH: torch.Tensor) -> int:
        """Bytes of all buffers for one column of a tile of so many rows."""
        ...

    def __init__(self, columns: Columns) -> None:
        """For tiles of these columns, of at most `columns.tile`."""
        ...

    def sums(self, hidden_CH: torch.Tensor, tile: Columns, rows: slice) -> torch.Tensor:
        """[5, C], in the order of `head._Sums`; hidden_CH: `rows` of the hidden rows."""
        ...

    def gradient(self, hidden_CH: torch.Tensor, tile: Columns, rows: slice, given: OutputGradients) -> torch.Tensor:
        """Of the loss with respect to the logits before the temperature, [C, V]: float32, or in the weight's dtype."""
        ...


class TorchScratch:
    """Taken once: the system would have to give and take such large buffers every time."""

    @staticmethod
    def column_bytes(rows: int, weight_VH: torch.Tensor) -> int:
        narrow = weight_VH.dtype.itemsize if weight_VH.is_cuda and weight_VH.dtype.itemsize < 4 else 0
        return rows * (2 * statistics_dtype(weight_VH.dtype).itemsize + narrow) + widened_bytes(weight_VH)

    def __init__(self, columns: Columns) -> None:
        weight_VH = columns.weight_VH
        size = min(columns.tile.rows, len(columns.labels_N)) * min(columns.tile.columns, len(weight_VH))
        self._logits = weight_VH.new_empty(size, dtype=statistics_dtype(weight_VH.dtype))
        self._second = torch.empty_like(self._logits)

    def logits(self, hidden_CH: torch.Tensor, tile: Columns) -> torch.Tensor:
        """[C, V], over the temperature; overwrites those of the tile before."""
        logits_CV = shaped(self._logits, (len(hidden_CH), len(tile.weight_VH)))
        return product(hidden_CH, tile.weight_VH.t(), logits_CV).div_(tile.temperature)

    def sums(self, hidden_CH: torch.Tensor, tile: Columns, rows: slice) -> torch.Tensor:
        logits_CV = self.logits(hidden_CH, tile)
        highest_C = logits_CV.amax(1)
        logits_CV -= highest_C[:, None]
        label_C = torch.where(tile.mine(rows), logits_CV.gather(1, tile.places(rows)[:, None]).squeeze(1), -torch.inf)
        weights_CV = self._exp(logits_CV)
        total_C = weights_CV.sum(1)
        weighted_C = logits_CV.mul_(weights_CV).sum(1)
        return torch.stack([highest_C, total_C, weighted_C, weights_CV.square_().sum(1), label_C])

    def gradient(self, hidden_CH: torch.Tensor, tile: Columns, rows: slice, given: OutputGradients) -> torch.Tensor:
        logprobs_CV = self.logits(hidden_CH, tile).sub_(given.top_logits_C[:, None]).add_(given.top_logprobs_C[:, None])
        gradient_CV = self._without_label(logprobs_CV, given)
        of_label_C = torch.where(tile.mine(rows), given.label_C, 0.0)
        gradient_CV.scatter_add_(1, tile.places(rows)[:, None], of_label_C[:, None])
        return gradient_CV.div_(tile.temperature)

    def _without_label(self, logprobs_CV: torch.Tensor, given: OutputGradients) -> torch.Tensor:
        """Gradient of the scaled logits without the label's own 1; overwrites `logprobs_CV`."""
        constant_C1 = given.constant_C[:, None]
        if given.entropy_C is None and given.squares_C is None:
            return logprobs_CV.exp_().mul_(constant_C1)
        probs_CV = self._exp(logprobs_CV)
        slope_CV = logprobs_CV.mul_(0.0 if given.entropy_C is None else -given.entropy_C[:, None])
        if given.squares_C is not None:
            slope_CV.addcmul_(probs_CV, 2 * given.squares_C[:, None])
        return slope_CV.add_(constant_C1).mul_(probs_CV)

    def _exp(self, values_CV: torch.Tensor) -> torch.Tensor:
        """In the second buffer."""
        return torch.exp(values_CV, out=shaped(self._second, values_CV.shape))


def shaped(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The first elements, as a matrix."""
    return buffer[: math.prod(shape)].view(shape)


def scratch_of(device: torch.device, dtype: torch.dtype) -> type[Scratch]:
    """Triton's where it can run: an NVIDIA GPU of capability 8 or more, Triton installed, at most 32 bits."""
    able = device.type == "cuda" and torch.version.hip is None and importlib.util.find_spec("triton") is not None
    if not able or dtype.itemsize > 4 or torch.cuda.get_device_capability(device) < (8, 0):
        return TorchScratch
    module = importlib.import_module("gppo_megatron.policy.megatron.head_triton")
    return module.TritonScratch  # type: ignore[no-any-return]
