"""Writing one file of a converted checkpoint, tensor by tensor, its SHA-256 taken on the way."""

import ctypes
import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import torch

from checkpoints_tools.sources import Source
from gppo_megatron.checkpoint.headers import DTYPES
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.mapping.pieces import Piece, StoredParameter

PIECE_BYTES = 8 * 2**20
BEGIN, WRITE = getattr(ctypes.CDLL(None), "sync_file_range", None), 2
"""Linux's call, and its flag to begin alone."""
CONTIGUOUS = torch.contiguous_format
HF_DTYPES = {torch_name: name for name, torch_name in DTYPES.items()}


@dataclass(frozen=True)
class Placed:
    """One box of a distributed checkpoint, at `offset` of its file for `length` bytes."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: int
    length: int


class HashingStream:
    """A file that is only ever appended to, with its length and SHA-256 so far.

    The disk begins with each piece at once, so that it works while the next tensors are laid out.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._digest, self.bytes = stream, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            self._digest.update(piece)
            self._stream.write(piece)
            if len(piece) == PIECE_BYTES:
                begin_writing(self._stream.fileno(), self.bytes, PIECE_BYTES)
            self.bytes += len(piece)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def begin_writing(descriptor: int, offset: int, length: int) -> None:
    """Have the disk begin with a part of a file, and do not wait. A hint alone: what counts is the later fsync."""
    if BEGIN is not None:
        BEGIN(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), WRITE)


class Target(Protocol):
    """How the parameters that share a file are written into it. It crosses into other processes."""

    def write(self, parameters: tuple[StoredParameter, ...], stream: HashingStream) -> list[Placed]:
        """Raises CheckpointError for NaN or infinity."""
        ...

    def bytes(self, parameter: StoredParameter) -> int: ...


@dataclass(frozen=True)
class MegatronTarget:
    """Chunks as torch's distributed checkpoints have them: each a whole file of torch.save.

    tensor: parts that each parameter is cut in, as tensor parallelism of this size would. dtype: None keeps it.
    """

    source: Source
    tensor: int = 1
    dtype: torch.dtype | None = None

    def write(self, parameters: tuple[StoredParameter, ...], stream: HashingStream) -> list[Placed]:
        placed = []
        for parameter in parameters:
            whole = converted(self.source.whole(parameter), parameter, self.dtype, self.source)
            rows = [piece.shape[0] for piece in parameter.pieces]
            held = [*torch.split(whole, rows), whole]  # the last for an alias
            for piece, part_of_it in zip(parameter.boxes, held, strict=False):
                for part, view in _parts(piece, part_of_it, parameter.cut_axis, self.tensor):
                    begin = stream.bytes
                    alone = (
                        view if view.untyped_storage().nbytes() == view.nbytes else view.clone(memory_format=CONTIGUOUS)
                    )
                    torch.save(alone.reshape(part.sizes), stream)  # type: ignore[arg-type]
                    placed.append(Placed(part.key, part.offsets, part.sizes, begin, stream.bytes - begin))
                    del alone
        return placed

    def bytes(self, parameter: StoredParameter) -> int:
        return parameter.numel * (self.dtype or self.source.dtype(parameter)).itemsize


@dataclass(frozen=True)
class HfTarget:
    """A safetensors file: a header of names, dtypes, shapes and places, then the tensors one after the other."""

    source: Source
    dtype: torch.dtype | None = None

    def write(self, parameters: tuple[StoredParameter, ...], stream: HashingStream) -> list[Placed]:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for parameter in parameters:
            dtype = self.dtype or self.source.dtype(parameter)
            for name, shape in hf_shapes(parameter):
                size = shape.numel() * dtype.itemsize
                header[name] = {"dtype": HF_DTYPES[str(dtype).removeprefix("torch.")], "shape": list(shape)} | {
                    "data_offsets": [at, at + size]
                }
                at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        stream.write(struct.pack("<Q", len(text)) + text)
        for parameter in parameters:
            for tensor in self.source.hf(parameter):
                flat = converted(tensor, parameter, self.dtype, self.source).contiguous().reshape(-1)
                stream.write(flat.view(torch.uint8).numpy().data)
        return []

    def bytes(self, parameter: StoredParameter) -> int:
        return parameter.numel * (self.dtype or self.source.dtype(parameter)).itemsize


def hf_shapes(parameter: StoredParameter) -> Iterator[tuple[str, torch.Size]]:
    parts = parameter.rule.layout.merge([torch.empty(parameter.shape, device="meta")])
    for name, part in zip(parameter.rule.hf, parts, strict=True):
        yield name, part.shape


def converted(
    tensor: torch.Tensor, parameter: StoredParameter, dtype: torch.dtype | None, source: Source
) -> torch.Tensor:
    """The tensor in `dtype`, after a look at its numbers. Raises CheckpointError for NaN or infinity."""
    low, high = torch.aminmax(tensor)
    if not (low.isfinite() and high.isfinite()):
        names = ", ".join(parameter.rule.hf)
        raise CheckpointError(f"{source.folder}: NaN or infinity in {names}; the weights are damaged")
    return tensor if dtype is None else tensor.to(dtype)


def _parts(piece: Piece, held: torch.Tensor, axis: int | None, size: int) -> Iterator[tuple[Piece, torch.Tensor]]:
    """The piece cut for tensor parallelism, where its length allows."""
    if axis is None or size == 1 or piece.shape[axis] % size:
        yield piece, held
        return
    for rank, view in enumerate(held.chunk(size, axis)):
        yield piece.part(axis, size, rank), view
