"""`.metadata` of a distributed checkpoint: where every box and object lies, in torch's own words."""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


@dataclass(frozen=True)
class Box:
    """The box of the tensor `key` from `offsets` with `sizes`, in `file` from byte `offset` for `length` bytes."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Object:
    """A pickled value, in `file` from byte `offset` for `length` bytes."""

    key: str
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class TensorKind:
    """shape: of the whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def pickled_metadata(tensors: dict[str, TensorKind], boxes: Iterable[Box], objects: Iterable[Object]) -> bytes:
    """The content of `.metadata`; the boxes of each tensor fill it."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for box in boxes:
        chunks[box.key].append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
        index = MetadataIndex(box.key, box.offsets, len(chunks[box.key]) - 1)
        where[index] = _StorageInfo(box.file, box.offset, box.length)
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(TensorProperties(dtype=kind.dtype), torch.Size(kind.shape), chunks[key])
        for key, kind in tensors.items()
    }
    for held in objects:
        entries[held.key] = BytesStorageMetadata()
        where[MetadataIndex(held.key)] = _StorageInfo(held.file, held.offset, held.length)
    return pickle.dumps(Metadata(entries, planner_data={key: (key,) for key in entries}, storage_data=where))
