"""Both kinds of model folders behind one face: whole parameters, as Megatron or as Hugging Face has them."""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from gppo_megatron.checkpoint.metadata import Chunk, Contents, StoredTensor, check
from gppo_megatron.config.architecture import Architecture
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.mapping.pieces import Piece, StoredLayout, StoredParameter

SHOWN = 5
CONVERTED = ("float64", "float32", "float16", "bfloat16")
INFERRED = ".rotary_emb.inv_freq"
TRAINING_KEYS = ("optimizer.", "rng_state", "rerun_state_machine_state", "chained_")
"""What a training checkpoint holds beside the model."""


class Source(Protocol):
    """A model folder that fits `layout`; reading gives one parameter at a time."""

    @property
    def folder(self) -> Path: ...

    @property
    def dequantized(self) -> bool:
        """Whether the folder's own numbers are quantized, and those read here are not."""
        ...

    def dtype(self, parameter: StoredParameter) -> torch.dtype: ...

    def whole(self, parameter: StoredParameter) -> torch.Tensor:
        """As Megatron has it without parallelism."""
        ...

    def hf(self, parameter: StoredParameter) -> tuple[torch.Tensor, ...]:
        """As Hugging Face has it, in the order of the rule's names."""
        ...

    def stamp(self) -> str:
        """Changes when a file of the folder does."""
        ...


@dataclass(frozen=True)
class HfSource:
    reader: HfReader

    @property
    def folder(self) -> Path:
        return self.reader.folder

    @property
    def dequantized(self) -> bool:
        return self.reader.quantized

    def dtype(self, parameter: StoredParameter) -> torch.dtype:
        return _torch_dtype(self.reader.dtype(parameter.rule.hf[0]))

    def whole(self, parameter: StoredParameter) -> torch.Tensor:
        return parameter.rule.layout.shard(self.hf(parameter), 1, 0)

    def hf(self, parameter: StoredParameter) -> tuple[torch.Tensor, ...]:
        return tuple(self.reader.read(name) for name in parameter.rule.hf)

    def stamp(self) -> str:
        config = self.folder / "config.json"  # it holds the blocks of quantized weights
        return _stamp(self.reader.files + ([config] if self.dequantized else []))


def open_hf(folder: Path, layout: StoredLayout, architecture: Architecture) -> HfSource:
    """Raises CheckpointError listing what is missing, surplus, misshapen, quantized in an unknown way or no floating
    numbers; from headers alone."""
    reader = HfReader(folder)
    wanted: dict[str, tuple[int, ...]] = {}
    mixed = []
    for parameter in layout.parameters:
        whole = torch.empty(parameter.shape, device="meta")
        parts = parameter.rule.layout.merge([whole])
        wanted |= {name: tuple(part.shape) for name, part in zip(parameter.rule.hf, parts, strict=True)}
        if len({reader.dtype(name) for name in parameter.rule.hf if name in reader.names}) > 1:
            mixed.append(" and ".join(parameter.rule.hf))
    surplus = {name for name in reader.names - wanted.keys() if not name.endswith(INFERRED)}
    if architecture.tied:
        surplus.discard("lm_head.weight")
    both = sorted(wanted.keys() & reader.names)
    misshapen = [
        f"{name} {list(reader.shape(name))} instead of {list(wanted[name])}"
        for name in both
        if reader.shape(name) != wanted[name]
    ]
    strange = [f"{name} ({reader.dtype(name)})" for name in both if reader.dtype(name) not in CONVERTED]
    unknown = [problem for name in both if (problem := reader.misfit(name)) is not None]
    problems = [
        *_listed("missing", sorted(wanted.keys() - reader.names)),
        *_listed("not part of this model", sorted(surplus)),
        *_listed("of another shape", misshapen),
        *_listed("not in a dtype that is converted", strange),
        *_listed("of different dtypes, though one parameter", mixed),
        *_listed("quantized", unknown, shown=1),
    ]
    if problems:
        raise CheckpointError(f"{folder}: the tensors do not fit config.json; {'; '.join(problems)}")
    return HfSource(reader)


@dataclass(frozen=True)
class MegatronSource:
    folder: Path
    contents: Contents

    @property
    def dequantized(self) -> bool:
        return False

    def dtype(self, parameter: StoredParameter) -> torch.dtype:
        return _torch_dtype(self.contents.tensors[_boxes_in(self.contents, parameter)[0].key].dtype)

    def whole(self, parameter: StoredParameter) -> torch.Tensor:
        """Raises CheckpointError where two keys of one parameter hold different numbers."""
        boxes = _boxes_in(self.contents, parameter)
        if parameter.alias is not None:
            whole, *others = (self._read(box) for box in boxes)
            if not all(torch.equal(whole, other) for other in others):
                keys = " and ".join(box.key for box in boxes)
                raise CheckpointError(f"{self.folder}: {keys} are one parameter, and differ")
            return whole
        if len(boxes) == 1:
            return self._read(boxes[0])
        whole = torch.empty(parameter.shape, dtype=self.dtype(parameter))
        rows = [box.shape[0] for box in boxes]
        for part, box in zip(torch.split(whole, rows), boxes, strict=True):
            part.copy_(self._read(box))
        return whole

    def hf(self, parameter: StoredParameter) -> tuple[torch.Tensor, ...]:
        return parameter.rule.layout.merge([self.whole(parameter)])

    def stamp(self) -> str:
        return _stamp([self.folder / ".metadata", *sorted(self.folder.glob("*.distcp"))])

    def _read(self, piece: Piece) -> torch.Tensor:
        """The box, out of the chunks it overlaps. Raises CheckpointError where they leave a hole in it."""
        tensor = self.contents.tensors[piece.key]
        box = torch.empty(piece.sizes, dtype=_torch_dtype(tensor.dtype))
        filled = 0
        for chunk, overlap in _overlaps(piece, tensor):
            held = self._load(piece.key, chunk, box.dtype)
            box[_slices(overlap, piece.offsets)] = held[_slices(overlap, chunk.offsets)]
            filled += math.prod(end - begin for begin, end in overlap)
        if filled != box.numel():
            raise CheckpointError(f"{self.folder}: {piece.key} has {filled} of {box.numel()} numbers of one part")
        return box.reshape(piece.shape)

    def _load(self, key: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        stored = chunk.stored
        with (self.folder / stored.file).open("rb") as stream:
            window = io.BufferedReader(Window(stream, stored.offset, stored.length))
            try:
                held = torch.load(window, weights_only=True, map_location="cpu")
            except (RuntimeError, OSError, EOFError, ValueError) as error:
                raise CheckpointError(f"{self.folder}: {key} in {stored.file} is damaged ({error})") from error
        if not isinstance(held, torch.Tensor) or held.numel() != math.prod(chunk.sizes) or held.dtype != dtype:
            raise CheckpointError(f"{self.folder}: {key} in {stored.file} is not the tensor that .metadata describes")
        return held.reshape(chunk.sizes)


def open_megatron(folder: Path, layout: StoredLayout) -> MegatronSource:
    """Raises CheckpointError: not complete, not safe, or keys that are missing, surplus, misshapen or with holes."""
    contents = check(folder)
    pieces = {box.key: (box, parameter) for parameter in layout.parameters for box in _boxes_in(contents, parameter)}
    missing = sorted(pieces.keys() - contents.tensors.keys())
    surplus = [key for key in contents.tensors if key not in pieces and not key.startswith(TRAINING_KEYS)]
    shapes, holes = [], []
    for key in sorted(pieces.keys() & contents.tensors.keys()):
        piece, parameter = pieces[key]
        stored = contents.tensors[key]
        rows = piece.stacked if parameter.padded else None
        if not _fits(stored.shape, piece.whole, rows):
            shapes.append(f"{key} {list(stored.shape)} instead of {list(piece.whole)}")
        elif sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.shape):
            holes.append(key)
    problems = [
        *_listed("missing", missing),
        *_listed("not part of this model", surplus),
        *_listed("of another shape", shapes),
        *_listed("not complete", holes),
    ]
    if problems:
        raise CheckpointError(f"{folder}: the tensors do not fit config.json; {'; '.join(problems)}")
    return MegatronSource(folder, contents)


def _boxes_in(contents: Contents, parameter: StoredParameter) -> tuple[Piece, ...]:
    """Those of the parameter that the checkpoint has; where it has none, those that it should have."""
    there = tuple(box for box in parameter.boxes if box.key in contents.tensors)
    return there if parameter.alias is not None and there else parameter.pieces


class Window(io.RawIOBase):
    """`length` bytes of a file from `offset`, as a file of its own."""

    def __init__(self, stream: io.BufferedReader, offset: int, length: int) -> None:
        super().__init__()
        self._stream, self._offset, self._length, self._at = stream, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._length - self._at))
        self._stream.seek(self._offset + self._at)
        read = self._stream.readinto(buffer[:count])
        self._at += read
        return read


def _overlaps(piece: Piece, tensor: StoredTensor) -> Iterator[tuple[Chunk, list[tuple[int, int]]]]:
    """The chunks that share numbers with the box, and the common box as (begin, end) along each axis."""
    for chunk in tensor.chunks:
        common = [
            (max(a, b), min(a + m, b + n))
            for a, m, b, n in zip(piece.offsets, piece.sizes, chunk.offsets, chunk.sizes, strict=True)
        ]
        if all(begin < end for begin, end in common):
            yield chunk, common


def _slices(box: list[tuple[int, int]], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin - start, end - start) for (begin, end), start in zip(box, origin, strict=True))


def _fits(stored: tuple[int, ...], wanted: tuple[int, ...], growing: int | None) -> bool:
    """Equal, but for more rows along the axis `growing`."""
    if growing is None or len(stored) != len(wanted):
        return stored == wanted
    return all(s >= w if axis == growing else s == w for axis, (s, w) in enumerate(zip(stored, wanted, strict=True)))


def _listed(what: str, items: list[str], shown: int = SHOWN) -> list[str]:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return [f"{what}: {', '.join(items[:shown])}{more}"] if items else []


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"tensors of the dtype {name!r} are not converted")
    return dtype


def _stamp(files: list[Path]) -> str:
    return ";".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)
