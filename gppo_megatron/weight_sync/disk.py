"""Weights through a folder that trainer and servers both see."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from gppo_megatron.weight_sync.servers import Faults, NamedTensors, Waits, WeightServer, on_all

SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Disk:
    """A Transport: one Hugging Face folder a version, of which the last stays.

    folder: where they are written. model: the folder whose side files they carry. file_bytes: of a file, about.
    """

    folder: Path
    model: Path
    waits: Waits
    file_bytes: int = 2**31

    def send(self, servers: Sequence[WeightServer], name: str, tensors: NamedTensors) -> Faults:
        """See `Transport.send`: the folder appears under its name once it is whole."""
        written, whole = self.folder / f".{name}", self.folder / name
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        for side in SIDE_FILES:
            if (self.model / side).exists():
                shutil.copy(self.model / side, written)
        self._write(written, tensors)
        shutil.rmtree(whole, ignore_errors=True)
        written.rename(whole)
        faults: Faults = self.waits.run(on_all(servers, lambda server: server.load_folder(str(whole), name)))
        for old in self.folder.iterdir():
            if old != whole:
                shutil.rmtree(old)
        return faults

    def close(self, servers: Sequence[WeightServer]) -> None:
        """The last version stays."""

    def _write(self, folder: Path, tensors: NamedTensors) -> None:
        held: dict[str, torch.Tensor] = {}
        count = 0
        for name, tensor in tensors:
            held[name] = tensor.detach().cpu().contiguous().clone()
            if sum(each.nbytes for each in held.values()) >= self.file_bytes:
                save_file(held, folder / f"model-{count:05}.safetensors", {"format": "pt"})
                held, count = {}, count + 1
        if held:
            save_file(held, folder / f"model-{count:05}.safetensors", {"format": "pt"})
