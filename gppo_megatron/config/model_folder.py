"""Is a Hugging Face model folder complete, and do its tokens fit its vocabulary? Reads JSON alone: no torch."""

import json
from pathlib import Path
from typing import Any

from gppo_megatron.config.schema import HfModel, RunConfig, TinyModel

INDEX = "model.safetensors.index.json"
MODEL = "model"
"""The folder, in a run's, of a model that the run makes."""


def model_path(config: RunConfig) -> Path:
    """Where the run's starting model lies; that of a tiny one is whole as soon as it is there."""
    match config.model:
        case TinyModel():
            return Path(config.run) / MODEL
        case HfModel(path=path):
            return Path(path)


def folder_problems(folder: Path, vocab: int) -> list[str]:
    """What is wrong with the weight and tokenizer files of `folder`, one sentence each.

    vocab: rows of the model's embedding; every token id must lie below it.
    """
    return [*_weight_problems(folder), *_tokenizer_problems(folder / "tokenizer.json", vocab)]


def _weight_problems(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.exists():
        found = any(folder.glob("*.safetensors"))
        return [] if found else [f"{folder} holds no *.safetensors file; other weight formats are not read"]
    try:
        files = set(_read(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{index} is not an index of safetensors files"]
    missing = sorted(str(name) for name in files if not (folder / str(name)).exists())
    return [f"{folder} lacks {', '.join(missing)}, which {INDEX} names"] if missing else []


def _tokenizer_problems(file: Path, vocab: int) -> list[str]:
    if not file.exists():
        return [f"{file.parent} holds no tokenizer.json; other tokenizer formats are not read"]
    try:
        token, largest = _largest_id(_read(file))
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{file} is not a tokenizer with a model.vocab"]
    if largest < vocab:
        return []
    return [
        f"the tokenizer's largest token id is {largest} ({token!r}), "
        f"but the vocabulary of config.json has {vocab} rows (vocab_size), ids 0 to {vocab - 1}"
    ]


def _largest_id(tokenizer: Any) -> tuple[str, int]:
    """The token with the largest id. A vocabulary is {token: id}, or [[token, score], ...] in the order of ids."""
    held = tokenizer["model"]["vocab"]
    ids = dict(held) if isinstance(held, dict) else {entry[0]: place for place, entry in enumerate(held)}
    for added in tokenizer.get("added_tokens") or []:
        ids[added["content"]] = added["id"]
    return max(ids.items(), key=lambda item: int(item[1]))


def _read(file: Path) -> Any:
    """Raises ValueError (a JSON or Unicode error is one)."""
    return json.loads(file.read_text(encoding="utf-8"))
