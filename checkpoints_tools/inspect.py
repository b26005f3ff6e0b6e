"""What a model folder is, from its headers and lists alone: no torch, no weights, no code of the folder run."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from checkpoints_tools.side_files import HF
from gppo_megatron.checkpoint.folder import UNFINISHED, is_unfinished, latest
from gppo_megatron.checkpoint.headers import HfTensor, hf_tensors
from gppo_megatron.checkpoint.manifest import MANIFEST, check_sizes
from gppo_megatron.checkpoint.metadata import StoredTensor, check, is_distributed, read_common, read_contents
from gppo_megatron.config.architecture import Architecture, parse_hf_config
from gppo_megatron.errors import CheckpointError, ConfigError

EMBEDDING = "embedding.word_embeddings.weight"
LEGACY = "latest_checkpointed_iteration.txt"
SHOWN_KEYS = 200


def describe(folder: Path, keys: bool = False) -> tuple[list[str], bool]:
    """Lines that say what `folder` is, and whether it is complete. keys: also every tensor.

    Raises CheckpointError where it is no model folder at all.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    if is_distributed(folder):
        return _distributed(folder, keys)
    if any(folder.glob("*.safetensors")) or (folder / "config.json").exists():
        return _hugging_face(folder, keys)
    if (newest := latest(folder)) is not None:
        lines, complete = describe(newest, keys)
        return [f"{folder} names {newest.name} as its newest checkpoint", *lines], complete
    if is_unfinished(folder) or (folder / ".journal").exists():
        return [f"kind: unfinished; writing it was never completed ({UNFINISHED})"], False
    legacy = [*folder.glob("mp_rank_*/model_optim_rng.pt"), *folder.glob("iter_*/mp_rank_*")]
    if legacy or (folder / LEGACY).exists():
        return ["kind: Megatron-LM's format before distributed checkpoints; it is not converted"], False
    raise CheckpointError(f"{folder}: neither a Hugging Face folder nor a distributed checkpoint of Megatron-Core")


def _hugging_face(folder: Path, keys: bool) -> tuple[list[str], bool]:
    lines = ["kind: Hugging Face (safetensors)"]
    try:
        tensors = hf_tensors(folder)
    except CheckpointError as error:
        return [*lines, f"complete: no; {error}", *_architecture(folder)], False
    whole, said = _published(folder)
    if (problem := _config_problem(folder / "config.json")) is not None:
        whole, said = False, problem
    lines += [f"complete: {'no; ' if not whole else ''}{said}", *_architecture(folder)]
    files = {tensor.file for tensor in tensors.values()}
    size = sum(tensor.bytes for tensor in tensors.values())
    numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
    lines.append(f"weights: {len(tensors)} tensors, {numbers:,} numbers, {_gib(size)} in {len(files)} files")
    lines.append(f"dtypes: {_dtypes(tensors)}")
    return lines + (_table(tensors) if keys else []), whole


def _distributed(folder: Path, keys: bool) -> tuple[list[str], bool]:
    lines = ["kind: distributed checkpoint of Megatron-Core (torch_dist)"]
    whole, said = _published(folder)
    try:
        contents = check(folder)
    except CheckpointError as error:
        contents, whole, said = None, False, str(error)
    lines += [f"complete: {'no; ' if not whole else ''}{said}", *_architecture(folder / HF)]
    if contents is None:
        try:
            contents = read_contents(folder)
        except CheckpointError:
            return lines, whole
    else:
        step = read_common(folder)
        if isinstance(step, dict) and isinstance(step.get("iteration"), int):
            lines.append(f"step: {step['iteration']}")
    model = {key: tensor for key, tensor in contents.tensors.items() if not key.startswith("optimizer.")}
    numbers = sum(math.prod(tensor.shape) for tensor in model.values())
    chunks = sum(len(tensor.chunks) for tensor in contents.tensors.values())
    size = sum(stored.length for stored in contents.stored())
    files = {stored.file for stored in contents.stored()}
    lines.append(f"weights: {len(model)} keys, {numbers:,} numbers")
    lines.append(f"stored: {chunks} chunks and {len(contents.objects)} objects, {_gib(size)} in {len(files)} files")
    if len(model) < len(contents.tensors):
        lines.append(f"optimizer: {len(contents.tensors) - len(model)} keys")
    lines += [f"dtypes: {_dtypes(model)}", *_layout(model), *_padding(folder, model)]
    return lines + (_table(model) if keys else []), whole


def _published(folder: Path) -> tuple[bool, str]:
    if is_unfinished(folder):
        return False, "writing it was never completed"
    if not (folder / MANIFEST).exists():
        return True, f"yes as far as its headers say; it has no {MANIFEST}, so damage to the weights would not show"
    try:
        records = check_sizes(folder)
    except CheckpointError as error:
        return False, str(error)
    return True, f"yes; all {len(records)} files of its manifest have their sizes (gppo convert verify reads them)"


def _config_problem(file: Path) -> str | None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "there is no config.json"
    except (ValueError, OSError) as error:
        return f"{file} cannot be read ({error})"
    return None if isinstance(config, dict) and config else f"{file} holds no keys"


def _architecture(folder: Path) -> list[str]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        a = parse_hf_config(config, str(folder / "config.json"))
    except FileNotFoundError:
        return ["architecture: unknown; there is no config.json"]
    except (ConfigError, ValueError, OSError) as error:
        return [f"architecture: not supported; {error}"]
    return [
        f"architecture: {a.family}, {a.layers} layers, hidden {a.hidden}, {a.heads} heads ({a.kv_heads} key-value) of "
        f"{a.head_dim}, mlp {a.ffn}, vocabulary {a.vocab}, {'tied' if a.tied else 'untied'}"
    ]


def _layout(model: dict[str, StoredTensor]) -> Iterator[str]:
    """What the chunks of the embedding tell of the processes that wrote it."""
    if EMBEDDING in model:
        yield f"layout: the embedding is in {len(model[EMBEDDING].chunks)} chunks; it loads at any layout"


def _padding(folder: Path, model: dict[str, StoredTensor]) -> Iterator[str]:
    architecture = _read(folder / HF / "config.json")
    if architecture is None or EMBEDDING not in model:
        return
    rows = model[EMBEDDING].shape[0]
    yield f"padding: {rows - architecture.vocab} rows ({rows} for a vocabulary of {architecture.vocab})"


def _read(file: Path) -> Architecture | None:
    try:
        return parse_hf_config(json.loads(file.read_text(encoding="utf-8")), str(file))
    except (ConfigError, ValueError, OSError):
        return None


def _dtypes(tensors: Mapping[str, HfTensor | StoredTensor]) -> str:
    counts = Counter(tensor.dtype for tensor in tensors.values())
    return ", ".join(f"{dtype} ({count})" for dtype, count in counts.most_common())


def _table(tensors: Mapping[str, HfTensor | StoredTensor]) -> list[str]:
    shown = [f"  {name}  {list(tensor.shape)}  {tensor.dtype}" for name, tensor in sorted(tensors.items())]
    return shown if len(shown) <= SHOWN_KEYS else [*shown[:SHOWN_KEYS], f"  and {len(shown) - SHOWN_KEYS} more"]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
