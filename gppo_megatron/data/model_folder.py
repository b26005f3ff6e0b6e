"""Hugging Face model folders: open one, or write that of a tiny model."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file

from gppo_megatron.config.architecture import (
    END_TOKEN,
    PAD_TOKEN,
    Architecture,
    hf_config_of_tiny,
    read_architecture,
)
from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.fused_experts import one_expert_at_a_time
from gppo_megatron.errors import CheckpointError, DataError

EMBEDDING_STD = 0.02
"""Small, so that the first policy is close to uniform."""


class Tokenizer:
    """Text to token ids and back, over a Hugging Face tokenizer.

    end_ids: tokens that end a response. end_id: the one of them that ends a reference answer.
    """

    def __init__(self, backend: Any, end_ids: frozenset[int]) -> None:
        self._backend = backend
        self._characters = _characters_of(backend)
        self.end_ids = end_ids
        self.end_id: int = backend.eos_token_id if backend.eos_token_id in end_ids else min(end_ids)
        self.pad_id: int = self.end_id if backend.pad_token_id is None else backend.pad_token_id

    def encode(self, text: str) -> list[int]:
        """The tokens of `text` alone: none is added. Raises DataError for text the vocabulary cannot express."""
        unknown = set() if self._characters is None else set(text) - self._characters
        if unknown:
            raise DataError(f"{text!r} holds characters that are not in the model's alphabet: {sorted(unknown)}")
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=False)
        if self._backend.unk_token_id is not None and self._backend.unk_token_id in token_ids:
            raise DataError(f"{text!r} holds text that the model's tokenizer does not know")
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens removed."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def encode_chat(self, text: str, system: str = "", reply: str = "") -> list[int]:
        """The tokens of a conversation in which a user wrote `text` and the model is to answer.

        system: instructions ahead of it, if any. reply: how the answer begins; a chat template that opens the answer
        with the same text by itself does not get it twice.
        Raises DataError where the tokenizer has no chat template, or one that has no place for instructions.
        """
        if self._backend.chat_template is None:
            raise DataError("the model's tokenizer has no chat template; set data.chat to false")
        instructions = [{"role": "system", "content": system}] if system else []
        messages = [*instructions, {"role": "user", "content": text}]
        try:
            written: str = self._backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise DataError(f"the tokenizer's chat template refuses the conversation: {error}") from error
        return self.encode(written if written.rstrip().endswith(reply) else written + reply)


@dataclass(frozen=True, eq=False)
class ModelFolder:
    """A Hugging Face model folder that exists and whose tokenizer fits its model."""

    path: Path
    architecture: Architecture
    tokenizer: Tokenizer


def open_folder(path: Path) -> ModelFolder:
    """Read a model folder's architecture and tokenizer; the weights are left alone.

    Raises ConfigError for an architecture that is not supported, CheckpointError for a tokenizer that is
    missing, broken, or larger than the model's vocabulary.
    """
    architecture = read_architecture(path)
    if not (path / "tokenizer_config.json").is_file():
        raise CheckpointError(f"{path}: no tokenizer_config.json; copy the model's tokenizer files into this folder")
    try:
        backend = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the tokenizer cannot be read ({error}); copy its files again") from error
    tokenizer = Tokenizer(backend, _end_ids(path, backend))
    largest = max(len(backend) - 1, *tokenizer.end_ids)
    if largest >= architecture.vocab:
        raise CheckpointError(
            f"{path}: the tokenizer has token id {largest}, but the model's vocabulary ends at "
            f"{architecture.vocab - 1}; use the tokenizer that belongs to this model"
        )
    return ModelFolder(path, architecture, tokenizer)


def create_tiny(model: TinyModel, folder: Path, seed: int) -> None:
    """Write a complete model folder, weights included. Equal seeds give files that are equal byte for byte.

    Raises ValueError where the alphabet repeats a character, CheckpointError where the weights cannot be written.
    """
    if len(set(model.alphabet)) != len(model.alphabet):
        raise ValueError(f"model.alphabet repeats a character: {model.alphabet!r}")
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config_of_tiny(model)
    generation = {"eos_token_id": [config["eos_token_id"]], "pad_token_id": config["pad_token_id"], "do_sample": True}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _character_tokenizer(model.alphabet).save_pretrained(folder)
    try:
        save_file(_random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, for one
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def _character_tokenizer(alphabet: str) -> Any:
    """One token a character. It has no unknown token: text outside the alphabet is an error."""
    vocabulary = {token: index for index, token in enumerate((PAD_TOKEN, END_TOKEN, *alphabet))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD_TOKEN, eos_token=END_TOKEN)


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Norms 1. Matrices normal with variance 1 / inputs, over 2 x layers more where they feed the residual stream."""
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for fused_name, parameter in module.named_parameters():
        for name, like in one_expert_at_a_time(fused_name, parameter):
            if like.ndim == 1:
                weights[name] = torch.ones(like.shape)
                continue
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                std = EMBEDDING_STD
            else:
                std = 1 / math.sqrt(like.shape[1])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * config["num_hidden_layers"])
            weights[name] = torch.empty(like.shape).normal_(0.0, std, generator=generator)
    return weights


def _characters_of(backend: Any) -> frozenset[str] | None:
    """The alphabet of a tokenizer with one token a character; None for every other tokenizer.

    Such a tokenizer answers a foreign character with an exception that has no type of its own, so text is
    checked before it gets there.
    """
    if not isinstance(backend.backend_tokenizer.model, tokenizers.models.WordLevel):
        return None
    characters = set(backend.get_vocab()) - set(backend.all_special_tokens)
    return frozenset(characters) if all(len(character) == 1 for character in characters) else None


def _end_ids(path: Path, backend: Any) -> frozenset[int]:
    """eos_token_id of generation_config.json, a number or a list, else the tokenizer's own."""
    file = path / "generation_config.json"
    ends = None
    if file.is_file():
        try:
            ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise CheckpointError(f"{file}: not a JSON object ({error})") from None
    if ends is None:
        ends = backend.eos_token_id
    if ends is None or ends == []:
        raise CheckpointError(f"{path}: no end token; set eos_token_id in generation_config.json")
    ids = ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int and end >= 0 for end in ids):
        raise CheckpointError(f"{file}: eos_token_id must be a token id or a list of them (got {ends!r})")
    return frozenset(ids)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
