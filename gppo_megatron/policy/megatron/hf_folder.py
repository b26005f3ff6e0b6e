"""Reading and writing Hugging Face safetensors folders, one tensor at a time."""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gppo_megatron.checkpoint.headers import INDEX, HfTensor, hf_tensors
from gppo_megatron.data.fused_experts import ExpertSlice, expert_slices, is_fused
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.block_scaled import SCALES, block_of, dequantize, misfit

FUSED_AXES = 3
"""Of a tensor over all experts of a layer."""
SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json",
)  # fmt: skip
SHARD_BYTES = 5 * 2**30


@dataclass(frozen=True)
class Stored:
    """A tensor under the name that models know it by. shape: as it is read.

    held: what the files hold, whole, or one expert's slice of it. scales: of an FP8 tensor, a number a block.
    """

    held: HfTensor
    key: str
    shape: tuple[int, ...]
    part: ExpertSlice | None = None
    scales: HfTensor | None = None

    @property
    def quantized(self) -> bool:
        return self.held.dtype.startswith("float8") or self.scales is not None


class HfReader:
    """The tensors of a folder by name; a file is read only when one of its tensors is asked for.

    Experts have a name each, in whichever form the files hold them. FP8 weights with a scale a block come dequantized,
    in `dequantized`; their scales have no name here.
    """

    def __init__(self, folder: Path, dequantized: torch.dtype = torch.float32) -> None:
        """Reads headers alone. Raises CheckpointError when there are no safetensors, a file is cut short, or an index
        does not fit its files."""
        self.folder = folder
        self._dequantized = dequantized
        self._block = block_of(folder)
        held = hf_tensors(folder)
        self.files = sorted({tensor.file for tensor in held.values()})
        stored = {name: each for key, tensor in held.items() for name, each in _stored(key, tensor)}
        self._stored = _with_scales(stored)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    @property
    def quantized(self) -> bool:
        """Whether a tensor is."""
        return any(stored.quantized for stored in self._stored.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        """Torch's name of what `read` gives."""
        stored = self._stored[name]
        return str(self._dequantized).removeprefix("torch.") if stored.quantized else stored.held.dtype

    def misfit(self, name: str) -> str | None:
        """Why a quantized tensor cannot be read, in words; None for any other one."""
        stored = self._stored[name]
        return misfit(name, stored.held.dtype, stored.shape, stored.scales, self._block) if stored.quantized else None

    def read(self, name: str) -> torch.Tensor:
        """Raises CheckpointError for a quantized tensor whose scheme is not known."""
        stored = self._stored[name]
        if (problem := self.misfit(name)) is not None:
            raise CheckpointError(f"{self.folder}: {problem}")
        tensor = _read(stored.held.file, stored.key, stored.part)
        if stored.scales is None or self._block is None:
            return tensor
        scales = _read(stored.scales.file, f"{stored.key}{SCALES}")
        return dequantize(tensor, scales, self._block).to(self._dequantized)


def _stored(key: str, held: HfTensor) -> Iterator[tuple[str, Stored]]:
    if not is_fused(key) or len(held.shape) != FUSED_AXES:
        yield key, Stored(held, key, held.shape)
        return
    for part in expert_slices(key, held.shape):
        yield part.name, Stored(held, key, (part.rows.stop - part.rows.start, held.shape[2]), part)


def _with_scales(stored: dict[str, Stored]) -> dict[str, Stored]:
    """Each scale with its weight; one without a weight stays a tensor of its own."""
    pairs = {name: name.removesuffix(SCALES) for name in stored if name.endswith(SCALES)}
    pairs = {scales: name for scales, name in pairs.items() if name in stored}
    paired = {name: replace(stored[name], scales=stored[scales].held) for scales, name in pairs.items()}
    return {name: each for name, each in (stored | paired).items() if name not in pairs}


def _read(file: Path, key: str, part: ExpertSlice | None = None) -> torch.Tensor:
    # A file opened for one tensor alone keeps no other in memory.
    try:
        with safe_open(file, framework="pt") as tensors:
            if part is None:
                return tensors.get_tensor(key)  # type: ignore[no-any-return]
            return tensors.get_slice(key)[part.expert, part.rows]  # type: ignore[no-any-return]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); copy it again") from error


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
    """Have config.json name the weights' dtype: transformers casts to the one it finds there, and would take weights
    for quantized ones where it says so."""
    if len(dtypes) != 1 or not config_file.exists():
        return
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
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
