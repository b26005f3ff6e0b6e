import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import Tokenizer, create_tiny, open_folder
from gppo_megatron.errors import CheckpointError, ConfigError, DataError

MODEL = TinyModel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    create_tiny(MODEL, path, seed=1)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return open_folder(folder).tokenizer


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    create_tiny(MODEL, tmp_path, seed=1)
    return tmp_path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_equal_seeds_write_equal_bytes(folder: Path, tmp_path: Path) -> None:
    create_tiny(MODEL, tmp_path / "again", seed=1)
    create_tiny(MODEL, tmp_path / "other", seed=2)
    assert contents(tmp_path / "again") == contents(folder)
    differing = {name for name, data in contents(tmp_path / "other").items() if data != contents(folder)[name]}
    assert differing == {"model.safetensors"}


def test_weights_have_the_documented_scales(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    norms = [tensor for tensor in weights.values() if tensor.ndim == 1]
    assert len(norms) == 2 * 4 + 1
    assert all(bool((norm == 1).all()) for norm in norms)
    expected = {
        "model.embed_tokens.weight": 0.02,
        "model.layers.0.self_attn.q_proj.weight": 1 / math.sqrt(64),
        "model.layers.1.self_attn.o_proj.weight": 1 / math.sqrt(64 * 4),
        "model.layers.1.mlp.down_proj.weight": 1 / math.sqrt(192 * 4),
    }
    for name, std in expected.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.1)
    assert len({tensor.flatten()[0].item() for tensor in weights.values() if tensor.ndim == 2}) == 2 * 7 + 1


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_model(tmp_path: Path, tied: bool) -> None:
    create_tiny(TinyModel(tied=tied), tmp_path, seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == set(dict(model.named_parameters()))
    assert ("lm_head.weight" in weights) is not tied
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert model.generation_config.eos_token_id == [1]


def test_transformers_loads_the_tokenizer(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 20]) == ["<pad>", "<end>", "0", " "]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, None)


@given(text=st.text(alphabet=MODEL.alphabet))
def test_text_survives_as_one_token_a_character(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids == [2 + MODEL.alphabet.index(character) for character in text]
    assert tokenizer.decode([0, *token_ids, 1, 0]) == text


@pytest.mark.parametrize("text", ["1x2", "1\n", "é", "<end>", "1<pad>"])
def test_text_outside_the_alphabet_is_an_error(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(DataError, match="alphabet"):
        tokenizer.encode(text)


def test_a_tokenizer_with_an_unknown_token_may_not_use_it(broken: Path) -> None:
    file = broken / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = {"<pad>": 0, "<end>": 1, "<unk>": 2, "12": 3, "3": 4}
    tokenizer["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    file.write_text(json.dumps(tokenizer))
    change(broken / "tokenizer_config.json", unk_token="<unk>")
    words = open_folder(broken).tokenizer
    assert words.encode("12 3") == [3, 4]
    with pytest.raises(DataError, match="does not know"):
        words.encode("12 4")


def test_end_tokens_come_from_the_generation_config(broken: Path) -> None:
    tokenizer = open_folder(broken).tokenizer
    assert (tokenizer.end_ids, tokenizer.end_id, tokenizer.pad_id) == (frozenset({1}), 1, 0)
    change(broken / "generation_config.json", eos_token_id=[5, 1, 3])
    assert (open_folder(broken).tokenizer.end_ids, open_folder(broken).tokenizer.end_id) == (frozenset({1, 3, 5}), 1)
    change(broken / "generation_config.json", eos_token_id=7)
    assert (open_folder(broken).tokenizer.end_ids, open_folder(broken).tokenizer.end_id) == (frozenset({7}), 7)
    (broken / "generation_config.json").unlink()
    assert open_folder(broken).tokenizer.end_ids == frozenset({1})


def test_a_folder_without_an_end_token_is_an_error(broken: Path) -> None:
    (broken / "generation_config.json").unlink()
    change(broken / "tokenizer_config.json", eos_token=None)
    with pytest.raises(CheckpointError, match="set eos_token_id"):
        open_folder(broken)


@pytest.mark.parametrize("text", ["[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, true]}', '{"eos_token_id": -1}'])
def test_a_generation_config_without_token_ids_is_an_error(text: str, broken: Path) -> None:
    (broken / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: (not a JSON object|eos_token_id must be)"):
        open_folder(broken)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be an integer >= 1 (got 'two')"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be an integer >= 1 (got -1)"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer >= 1 (got 0)"),
        ({"hidden_size": None}, "hidden_size must be an integer >= 1 (got None)"),
        ({"head_dim": True}, "head_dim must be an integer >= 1 (got True)"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number > 0 (got '1e-6')"),
        ({"rope_theta": -1.0}, "rope_theta must be a number > 0 (got -1.0)"),
        ({"rope_scaling": "x"}, "rope scaling 'x' is not supported"),
    ],
)
def test_a_config_with_impossible_numbers_is_an_error(values: dict[str, Any], problem: str, broken: Path) -> None:
    change(broken / "config.json", **values)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        open_folder(broken)


def test_a_config_that_is_no_object_is_an_error(broken: Path) -> None:
    (broken / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        open_folder(broken)
    (broken / "config.json").unlink()
    (broken / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        open_folder(broken)


def test_a_vocabulary_smaller_than_a_token_id_is_an_error(broken: Path) -> None:
    change(broken / "config.json", vocab_size=20)
    with pytest.raises(CheckpointError, match=r"token id 20.*ends at 19"):
        open_folder(broken)


def test_a_missing_or_broken_tokenizer_is_an_error(broken: Path) -> None:
    whole = (broken / "tokenizer.json").read_text()
    for text in ("{}", whole[:100]):
        (broken / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read"):
            open_folder(broken)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_folder(broken)
    (broken / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_folder(broken)
    (broken / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="copy the model's tokenizer"):
        open_folder(broken)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        open_folder(tmp_path / "nowhere")


def test_an_alphabet_that_repeats_a_character_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="repeats"):
        create_tiny(TinyModel(alphabet="0120"), tmp_path, seed=1)


def test_weights_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        create_tiny(MODEL, tmp_path, seed=1)


def test_chat_writes_the_template_and_tokenises_it(broken: Path) -> None:
    with pytest.raises(DataError, match="no chat template"):
        open_folder(broken).tokenizer.encode_chat("1+1")
    template = "({{ messages[0].content }}){% if add_generation_prompt %}={% endif %}"
    change(broken / "tokenizer_config.json", chat_template=template)
    tokenizer = open_folder(broken).tokenizer
    assert tokenizer.decode(tokenizer.encode_chat("1+1")) == "(1+1)="
