"""Reading and writing Hugging Face safetensors folders, one tensor at a time."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gppo_megatron.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json",
)  # fmt: skip
SHARD_BYTES = 5 * 2**30


class HfReader:
    """The tensors of a folder by name; a file is read only when one of its tensors is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError when there are no safetensors, one is damaged, or an index names a missing one."""
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        for file in _weight_files(folder):
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._file_of |= dict.fromkeys(tensors.keys(), file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: not a complete safetensors file ({error})") from error

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], framework="pt") as tensors:
            return tensors.get_tensor(name)  # type: ignore[no-any-return]


def _weight_files(folder: Path) -> list[Path]:
    """What transformers would read: the files of an index, else model.safetensors, else every one there is.

    A folder may hold the same weights a second time under another project's names; those are left alone.
    """
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not an index of safetensors files; copy it again") from error
        missing = sorted(name for name in names if not (folder / name).exists())
        if missing:
            raise CheckpointError(f"{folder}: the index names files that are missing: {', '.join(missing)}")
        return sorted(folder / name for name in names)
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors file; convert the weights to safetensors first")
    return files


def write_hf_folder(folder: Path, weights: Iterable[tuple[str, torch.Tensor]], side_files_from: Path) -> None:
    """Write weights and the model's side files; the folder appears complete or not at all.

    Raises CheckpointError when `folder` exists, or cannot be written (a full disk).
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; a checkpoint is never overwritten")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _write_files(unfinished, weights, side_files_from)
        unfinished.rename(folder)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_files(folder: Path, weights: Iterable[tuple[str, torch.Tensor]], side_files_from: Path) -> None:
    """Everything a model folder holds."""
    folder.mkdir(parents=True)
    dtypes: set[torch.dtype] = set()
    file_of = _write_shards(folder, _noting(weights, dtypes))
    for name in SIDE_FILES:
        if (side_files_from / name).exists():
            shutil.copy(side_files_from / name, folder / name)
    _declare_dtype(folder / "config.json", dtypes)
    if len(set(file_of.values())) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}, indent=1))
    else:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")


def _noting(
    weights: Iterable[tuple[str, torch.Tensor]], dtypes: set[torch.dtype]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights; their dtypes are added to `dtypes` as they pass."""
    for name, tensor in weights:
        dtypes.add(tensor.dtype)
        yield name, tensor


def _declare_dtype(config_file: Path, dtypes: set[torch.dtype]) -> None:
    """Have config.json name the weights' dtype: transformers casts to the one it finds there."""
    if len(dtypes) != 1 or not config_file.exists():
        return
    config = json.loads(config_file.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtypes.pop()).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_shards(folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Write files of at most SHARD_BYTES (or one tensor); name -> file."""
    file_of: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    files = 0

    def flush() -> None:
        nonlocal files
        files += 1
        name = f"model-{files:05d}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(held, name))
        held.clear()

    for name, tensor in weights:
        size = sum(t.numel() * t.element_size() for t in (*held.values(), tensor))
        if held and size > SHARD_BYTES:
            flush()
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
    flush()
    return file_of
