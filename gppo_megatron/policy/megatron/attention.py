"""Core attention in torch's own kernels, a sequence at a time: packed, context parallel, on any device.

Its cost is the sum of the squared lengths, and no sequence can see another. Letters: S places of this process, B
sequences side by side, Q query heads, K key-value heads, D width of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention


class SequenceAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention inside each sequence; Megatron builds it from a layer's specification.

    Under context parallelism keys and values are gathered, and their gradients scattered, over the context group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale or config.kv_channels**-0.5
        group = getattr(pg_collection, "cp", None)
        self._context = parallel_state.get_context_parallel_group() if group is None else group

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        """query [S, B, Q, D], key and value [S, B, K, D] -> [S, B, Q x D]; of packed sequences all without the B."""
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        context = self._context.size()
        lengths = _lengths(packed_seq_params.cu_seqlens_q) if packed else [len(query) * context]
        if context == 1:
            cut = [torch.split(tensor, lengths) for tensor in (query, key, value)]
            mixed = torch.cat([self._attend(q, k, v, causal=True) for q, k, v in zip(*cut, strict=True)])
        else:
            mixed = self._across_context(query, key, value, lengths)
        mixed = mixed.flatten(2)
        return mixed.squeeze(1) if packed else mixed

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """[S, B, Q, D], of one sequence in each column."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return mixed.permute(2, 0, 1, 3)

    def _across_context(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """As `forward`, where this process has two slices of each sequence; lengths: of the whole sequences."""
        size, rank = self._context.size(), self._context.rank()
        order = torch.cat([slices(lengths, size, member) for member in range(size)]).argsort().to(query.device)
        keys, values = (
            gather_from_sequence_parallel_region(tensor.contiguous(), group=self._context)[order]
            for tensor in (key, value)
        )
        mixed, start, here = [], 0, 0
        for length in lengths:
            step = length // (2 * size)
            for part in (rank, 2 * size - 1 - rank):
                seen = slice(start, start + (part + 1) * step)
                mask = torch.ones(step, (part + 1) * step, dtype=torch.bool, device=query.device).tril(part * step)
                mixed.append(self._attend(query[here : here + step], keys[seen], values[seen], mask))
                here += step
            start += length
        return torch.cat(mixed)


def slices(lengths: Sequence[int], size: int, rank: int) -> torch.Tensor:
    """Which of the tokens of sequences end to end are member `rank`'s of `size`: int64, in the order it holds them.

    A sequence is cut in 2 x size slices, and a member has the first and the last that are not another's: causal
    attention then costs every member the same.

    >>> slices([4, 8], size=2, rank=0)
    tensor([ 0,  3,  4,  5, 10, 11])
    """
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    if size == 1:
        return torch.arange(sum(lengths))
    return torch.cat(
        [
            torch.arange(start + part * (length // (2 * size)), start + (part + 1) * (length // (2 * size)))
            for start, length in zip(starts, lengths, strict=True)
            for part in (rank, 2 * size - 1 - rank)
        ]
    )


def _lengths(bounds: torch.Tensor) -> list[int]:
    return bounds.diff().tolist()
