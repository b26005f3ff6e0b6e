"""What a Hugging Face folder holds, from the headers of its safetensors files alone: no torch, no weights read."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gppo_megatron.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER = "adapter_config.json"
LARGEST_HEADER = 100 * 2**20
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""safetensors' names and torch's."""


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a folder. dtype: torch's name of it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def hf_tensors(folder: Path) -> dict[str, HfTensor]:
    """Every tensor of the files that transformers would read, by name.

    Raises CheckpointError for no files, an index that names missing files or other tensors, a file cut short, or a
    folder that holds an adapter and not a model.
    """
    if (folder / ADAPTER).exists():
        raise CheckpointError(f"{folder} holds an adapter ({ADAPTER}), not a model; merge it into its model first")
    index = folder / INDEX
    if not index.exists():
        files = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{folder}: no {SINGLE}, and no {INDEX} that names its parts; copy the weights again, or convert other "
                "formats to safetensors first"
            )
        if len(files) > 1:
            raise CheckpointError(f"{folder}: {len(files)} safetensors files and no {INDEX}; copy the index as well")
        return _tensors_of(files[0])
    listed = _weight_map(index)
    missing = sorted(name for name in set(listed.values()) if not (folder / name).is_file())
    if missing:
        raise CheckpointError(f"{folder}: {INDEX} names files that are missing: {', '.join(missing)}")
    found: dict[str, HfTensor] = {}
    for name in sorted(set(listed.values())):
        found |= _tensors_of(folder / name)
    ghosts = sorted(name for name, file in listed.items() if name not in found or found[name].file.name != file)
    if ghosts:
        raise CheckpointError(f"{folder}: {INDEX} names tensors that its files do not hold: {', '.join(ghosts[:5])}")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files; copy it again") from error


def _tensors_of(file: Path) -> dict[str, HfTensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
        if length > LARGEST_HEADER:
            raise CheckpointError(f"{file}: not a safetensors file")
        text = stream.read(length)
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        found = {name: _tensor(file, entry) for name, entry in entries.items()}
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{file}: its header is damaged ({error!r})") from error
    if size != 8 + length + end:
        raise CheckpointError(f"{file} has {size} bytes instead of {8 + length + end}; copy it again")
    return found


def _tensor(file: Path, entry: Any) -> HfTensor:
    begin, end = entry["data_offsets"]
    return HfTensor(file, DTYPES.get(entry["dtype"], entry["dtype"]), tuple(map(int, entry["shape"])), end - begin)
