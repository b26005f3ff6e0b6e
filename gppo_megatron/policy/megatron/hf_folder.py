"""Reading and writing Hugging Face safetensors folders, one tensor at a time."""

import json
import shutil
from collections.abc import Iterable
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
        """Raises CheckpointError when there are no safetensors, or an index names files that are missing."""
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: no *.safetensors file; convert the weights to safetensors first")
        if (folder / INDEX).exists():
            wanted = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
            missing = sorted(wanted - {file.name for file in files})
            if missing:
                raise CheckpointError(f"{folder}: the index names files that are missing: {', '.join(missing)}")
        self._file_of: dict[str, Path] = {}
        for file in files:
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


def write_hf_folder(folder: Path, weights: Iterable[tuple[str, torch.Tensor]], side_files_from: Path) -> None:
    """Write weights and the model's side files; the folder appears complete or not at all.

    Raises CheckpointError when `folder` exists.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; a checkpoint is never overwritten")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    file_of = _write_shards(unfinished, weights)
    for name in SIDE_FILES:
        if (side_files_from / name).exists():
            shutil.copy(side_files_from / name, unfinished / name)
    if len(set(file_of.values())) > 1:
        (unfinished / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}, indent=1))
    else:
        (unfinished / "model-00001.safetensors").rename(unfinished / "model.safetensors")
    unfinished.rename(folder)


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
