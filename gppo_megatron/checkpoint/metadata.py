"""What a Megatron-Core distributed checkpoint (`torch_dist`) holds, read without torch and without trusting it.

metadata.json   which format; Megatron writes it last
.metadata       a pickle: every key, shape and chunk, and where in which file it lies
*.distcp        the chunks; each is a file of torch.save, at an offset
common.pt       torch.save: what is not sharded
"""

import functools
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gppo_megatron.checkpoint.pickles import (
    PLAIN,
    Standin,
    load,
    load_file,
    load_saved,
    named,
    refuse_forced_unpickling,
)
from gppo_megatron.errors import CheckpointError

METADATA, METADATA_JSON, COMMON = ".metadata", "metadata.json", "common.pt"

_METADATA_NAMES = {
    **PLAIN,
    **named(
        "torch.distributed.checkpoint.metadata",
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
    ),
    **named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", by=lambda value: value),
    **named("torch.distributed.checkpoint.filesystem", "_StorageInfo", "_StoragePrefix"),
    # Megatron keeps the plan of every process beside what torch needs.
    **named("torch.distributed.checkpoint.planner", "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    **named("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
    **named("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata", "MCoreSavePlan"),
    # torch notes the folder a checkpoint was written to.
    **named("pathlib", "PosixPath", by=lambda *parts: str(PurePosixPath(*parts))),
}


@dataclass(frozen=True)
class Stored:
    """Where one chunk lies: `length` bytes from `offset` in `file`, a path inside the checkpoint."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: it starts at `offsets` and has `sizes`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: Stored


@dataclass(frozen=True)
class StoredTensor:
    """One key of the checkpoint. dtype: torch's name of it, such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """Everything that is in a distributed checkpoint: tensors and pickled objects by key."""

    tensors: dict[str, StoredTensor]
    objects: dict[str, Stored]

    def stored(self) -> Iterator[Stored]:
        for tensor in self.tensors.values():
            yield from (chunk.stored for chunk in tensor.chunks)
        yield from self.objects.values()


def is_distributed(folder: Path) -> bool:
    """Whether this is meant to be a distributed checkpoint, complete or not."""
    return (folder / METADATA).exists() or (folder / METADATA_JSON).exists()


def read_contents(folder: Path) -> Contents:
    """Read `.metadata` alone. Raises CheckpointError for one that is missing, damaged or asks for foreign code."""
    metadata = load_file(folder / METADATA, functools.partial(load, allowed=_METADATA_NAMES))
    try:
        return _contents(metadata)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder / METADATA} is damaged, or of another version of torch ({error!r})") from error


def check(folder: Path) -> Contents:
    """To be called before Megatron-Core or torch touches a distributed checkpoint: complete, and nothing to run in it.

    Raises CheckpointError: a file is missing or cut short, a pickle asks for code, the format is another one, or the
    environment forces unrestricted unpickling. Tensors' bytes are not read: `manifest.verify` does that.
    """
    refuse_forced_unpickling()
    _check_format(folder)
    contents = read_contents(folder)
    _check_files(folder, contents)
    read_common(folder)
    for key, stored in contents.objects.items():
        with (folder / stored.file).open("rb") as stream:
            stream.seek(stored.offset)
            # torch unpickles these without any restriction.
            load_saved(io.BytesIO(stream.read(stored.length)), f"{folder / stored.file}: {key}")
    return contents


def read_common(folder: Path) -> Any:
    """`common.pt`: numbers, text, lists and dicts; everything else in it is a stand-in. Raises CheckpointError."""
    return load_file(folder / COMMON, load_saved)


def _check_format(folder: Path) -> None:
    file = folder / METADATA_JSON
    try:
        backend = json.loads(file.read_text(encoding="utf-8"))["sharded_backend"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {METADATA_JSON}: writing it was never completed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({error!r})") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{folder} is of the format {backend!r}; only 'torch_dist' is read")


def _check_files(folder: Path, contents: Contents) -> None:
    ends: dict[str, int] = {}
    for stored in contents.stored():
        ends[stored.file] = max(ends.get(stored.file, 0), stored.offset + stored.length)
        if stored.offset < 0 or stored.length < 0 or "/" in stored.file or stored.file in ("", ".", ".."):
            raise CheckpointError(f"{folder / METADATA} points outside the checkpoint, to {stored.file!r}")
    for name, end in sorted(ends.items()):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        size = (folder / name).stat().st_size
        if size < end:
            raise CheckpointError(f"{folder}: {name} is cut short, {size} bytes instead of at least {end}")


def _contents(metadata: Any) -> Contents:
    where: dict[tuple[str, tuple[int, ...] | None], Stored] = {}
    for index, info in metadata.storage_data.items():
        offset = getattr(index, "offset", None)
        stored = Stored(str(info.relative_path), int(info.offset), int(info.length))
        where[(index.fqn, None if offset is None else tuple(offset))] = stored
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Stored] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            tensors[key] = _tensor(key, entry, where)
        elif (key, None) in where:  # else an object that no process wrote
            objects[key] = where[(key, None)]
    return Contents(tensors, objects)


def _tensor(key: str, entry: Standin, where: dict[tuple[str, tuple[int, ...] | None], Stored]) -> StoredTensor:
    held: Any = entry
    dtype = held.properties.state[0]
    chunks = tuple(
        Chunk(tuple(chunk.offsets), tuple(chunk.sizes), where[(key, tuple(chunk.offsets))]) for chunk in held.chunks
    )
    return StoredTensor(tuple(held.size), str(dtype), chunks)
