"""Tensors in groups of a bounded size."""

from collections.abc import Iterator

import torch

from gppo_megatron.weight_sync.servers import NamedTensors

Bucket = list[tuple[str, torch.Tensor]]


def buckets(tensors: NamedTensors, most_bytes: int) -> Iterator[Bucket]:
    """Neighbours together up to `most_bytes`; a larger tensor makes a bucket of its own. No tensor is left out."""
    bucket: Bucket = []
    held = 0
    for name, tensor in tensors:
        if bucket and held + tensor.nbytes > most_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket
