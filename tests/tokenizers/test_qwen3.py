"""Templates with Qwen3's real tokenizer; `make test-tokenizers` brings it."""

import json
import shutil
from pathlib import Path

import pytest

from gppo_megatron.data.files.templates import TEMPLATES, Writer
from gppo_megatron.data.model_folder import ModelFolder, open_folder

TOKENIZER = Path(__file__).parents[2] / ".cache" / "qwen3-tokenizer" / "package" / "models"
IM_START, IM_END, END_OF_TEXT = 151644, 151645, 151643
PROBLEM = "What is 12 + 30?\nGive \\frac{a}{b}, 数学 and ½."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The tokenizer beside the configuration of Qwen3-0.6B; there are no weights."""
    path = tmp_path_factory.mktemp("qwen3")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path / name)
    config = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": True, "max_position_embeddings": 40960,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, END_OF_TEXT]}))
    return open_folder(path)


def test_a_response_ends_at_the_end_of_turn_or_of_text(folder: ModelFolder) -> None:
    assert folder.tokenizer.end_ids == {IM_END, END_OF_TEXT}
    assert folder.tokenizer.end_id == IM_END


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_literal_form_is_written_and_read_back(name: str, folder: ModelFolder) -> None:
    template = TEMPLATES[name]
    written = Writer(template, chat=False, tokenizer=folder.tokenizer).write(PROBLEM, "42")
    visible = template.text(PROBLEM).replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert folder.tokenizer.decode(written.prompt_ids) == visible
    assert folder.tokenizer.decode(written.answer_ids) == template.response("42")
    assert written.answer_ids[-1] == IM_END


def test_qwens_own_template_is_the_literal_one_up_to_the_system_turn(folder: ModelFolder) -> None:
    """qwen_boxed spells the chat form out; the tokenizer's chat template must give the very same tokens."""
    literal = Writer(TEMPLATES["qwen_boxed"], chat=False, tokenizer=folder.tokenizer).write(PROBLEM, "42")
    chat = Writer(TEMPLATES["qwen_boxed"], chat=True, tokenizer=folder.tokenizer).write(PROBLEM, "42")
    assert literal.prompt_ids == chat.prompt_ids
    assert [token for token in chat.prompt_ids if token in (IM_START, IM_END)] == [
        IM_START, IM_END, IM_START, IM_END, IM_START,
    ]  # fmt: skip


def test_stops_are_single_tokens(folder: ModelFolder) -> None:
    assert Writer(TEMPLATES["qwen_boxed"], chat=False, tokenizer=folder.tokenizer).stop_ids() == {IM_END}
    (newline,) = Writer(TEMPLATES["plain_question"], chat=False, tokenizer=folder.tokenizer).stop_ids()
    assert folder.tokenizer.decode([newline]) == "\n"


def test_the_answer_begins_inside_the_thinking_that_the_template_opened(folder: ModelFolder) -> None:
    written = Writer(TEMPLATES["r1_zero"], chat=True, tokenizer=folder.tokenizer).write(PROBLEM, "42")
    (think,) = folder.tokenizer.encode("<think>")
    assert written.prompt_ids[-1] == think
    assert written.prompt_ids.count(think) == 2  # once in the instructions
