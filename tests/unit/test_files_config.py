"""`data: {kind: files}` in a run: what is checked before it starts, and what the tokenizer's chat template is given."""

import json
from pathlib import Path

import pytest

from gppo_megatron.config.checks import check
from gppo_megatron.config.load import load
from gppo_megatron.config.schema import FileData, TinyModel
from gppo_megatron.data.files.templates import TEMPLATES, Writer
from gppo_megatron.data.model_folder import Tokenizer, create_tiny, open_folder
from gppo_megatron.errors import ConfigError, DataError

RUN = """\
run: runs/x
steps: 10
model: {{kind: tiny}}
data: {{kind: files, path: "{folder}/*.jsonl", max_prompt_tokens: 400}}
rollout: {{max_new_tokens: 16}}
"""


def problems(folder: Path, *overrides: str) -> list[str]:
    (folder / "a.jsonl").touch()
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    try:
        check(load(folder / "run.yaml", overrides))
    except ConfigError as error:
        return [line.replace(f"{folder}/", "") for line in str(error).split("\n  ")[1:]]
    return []


def test_defaults(tmp_path: Path) -> None:
    assert problems(tmp_path) == []
    data = load(tmp_path / "run.yaml").data
    assert data == FileData(path=f"{tmp_path}/*.jsonl", max_prompt_tokens=400)
    assert isinstance(data, FileData)
    assert (data.adapter, data.template, data.strict) == ("plain", "boxed_user", False)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "data.path=none.jsonl",
            "data.path: no such file or folder, and no file matches it as a pattern (got 'none.jsonl')",
        ),
        ("data.path=", "data.path: must be text (got null)"),
        (
            "data.evaluation=none-*",
            "data.evaluation: no such file or folder, and no file matches it as a pattern (got 'none-*')",
        ),
        ("data.evaluation_adapter=aime", "data.evaluation_adapter: used with data.evaluation alone, but that is null"),
        ("data.evaluation_repeats=true", "data.evaluation_repeats: used with data.evaluation alone, but that is null"),
        (
            "data.max_prompt_tokens=500",
            "data.max_prompt_tokens: must be at most 496, the model's 512 positions less rollout.max_new_tokens "
            "(got 500)",
        ),
        (
            "batch.micro_batch_tokens=415",
            "batch.micro_batch_tokens: must hold a prompt of data.max_prompt_tokens = 400 and a response of "
            "rollout.max_new_tokens = 16, 416 in all (got 415)",
        ),
        (
            "rollout.cache_tokens=300",
            "rollout.cache_tokens: must hold a prompt of data.max_prompt_tokens = 400 and a response of "
            "rollout.max_new_tokens = 16, 416 in all (got 300)",
        ),
        (
            "data.columns.question=q",
            "data.columns: must be names of columns, for `prompt` and `answer` (got {'question': 'q'})",
        ),
        ("data.holdout=1", "data.holdout: must be between 0 and 1, both excluded (got 1.0)"),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, overrides: str, expected: str) -> None:
    assert problems(tmp_path, *overrides.split()) == [expected]


def test_what_just_fits_passes(tmp_path: Path) -> None:
    fitting = ("data.max_prompt_tokens=496", "batch.micro_batch_tokens=512", "rollout.cache_tokens=512")
    assert problems(tmp_path, *fitting, f"data.evaluation={tmp_path}/a.jsonl", "data.evaluation_adapter=aime") == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    alphabet = "".join(sorted({*map(chr, range(32, 127)), "\n"}))
    create_tiny(TinyModel(alphabet=alphabet), tmp_path / "model", seed=1)
    return tmp_path / "model"


def with_template(folder: Path, template: str) -> Tokenizer:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return open_folder(folder).tokenizer


TURNS = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% endif %}"
)


def test_the_chat_template_gets_the_system_text_and_the_reply(folder: Path) -> None:
    tokenizer = with_template(folder, TURNS)

    def prompt(name: str) -> str:
        return tokenizer.decode(Writer(TEMPLATES[name], True, tokenizer).write("Why?", "7").prompt_ids)

    assert prompt("none") == "[user:Why?][assistant:"
    assert prompt("qwen_boxed") == f"[system:{TEMPLATES['qwen_boxed'].system}][user:Why?][assistant:"
    assert prompt("r1_zero") == f"[system:{TEMPLATES['r1_zero'].system}][user:Why?][assistant:<think>"


def test_a_chat_template_that_opens_the_thinking_does_not_open_it_twice(folder: Path) -> None:
    tokenizer = with_template(folder, TURNS.replace("[assistant:", "[assistant:<think>\n"))
    assert tokenizer.decode(tokenizer.encode_chat("Why?", reply="<think>")) == "[user:Why?][assistant:<think>\n"


def test_a_chat_template_without_a_system_turn_is_named(folder: Path) -> None:
    tokenizer = with_template(
        folder, "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + TURNS
    )
    with pytest.raises(DataError, match="chat template refuses the conversation: no system turns"):
        tokenizer.encode_chat("Why?", system="Think.")
    assert tokenizer.decode(tokenizer.encode_chat("Why?")) == "[user:Why?][assistant:"
