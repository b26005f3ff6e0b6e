"""From files to what a run trains on: split, graded, written; and the command that only looks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gppo_verifiers.math.grading import grade

from gppo_megatron.cli import main
from gppo_megatron.config.schema import FileData, TinyModel
from gppo_megatron.data.files.source import load_problems
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.data.split import Problems
from gppo_megatron.errors import DataError
from gppo_megatron.types import Prompt
from tests.unit.code_points import CodePoints, written

DATA = Path(__file__).parents[1] / "data"
GSM8K = DATA / "gsm8k"
FAULTS = DATA / "files" / "faults.jsonl"
TRAIN = FileData(path=str(GSM8K / "train-sample.jsonl"), adapter="gsm8k", holdout=0.2)


def load(config: FileData) -> tuple[Problems, list[str]]:
    said: list[str] = []
    return load_problems(config, CodePoints(), said.append), said


def texts(prompts: tuple[Prompt, ...]) -> list[str]:
    return [written(prompt.token_ids) for prompt in prompts]


def test_gsm8k_is_split_written_and_graded() -> None:
    problems, said = load(TRAIN)
    train, heldout = texts(problems.train), texts(problems.heldout)
    assert (len(train) + len(heldout), len({*train, *heldout})) == (30, 30)
    assert 2 <= len(heldout) <= 12
    assert (problems.drawn, problems.duplicates, problems.stop_ids) == (30, 0, frozenset())
    for prompt in (*problems.train, *problems.heldout):
        assert written(prompt.token_ids).endswith(
            "\nPlease reason step by step, and put your final answer within \\boxed{}."
        )
        assert prompt.answer_ids[-1] == 0
        response = written(prompt.answer_ids[:-1])
        gold = response.removeprefix("\\boxed{").removesuffix("}")
        assert grade(prompt.task.payload, f"So it is {response}.").score == 1.0
        assert grade(prompt.task.payload, f"So it is \\boxed{{{int(gold) + 1}}}.").score == 0.0
        assert grade(prompt.task.payload, f"Answer: {gold}").score == 0.0
    assert said[-1].splitlines()[0].endswith("train-sample.jsonl: 30 rows, 30 kept, 0 left out")


def test_commas_and_signs_of_gsm8k_are_read() -> None:
    problems, _ = load(TRAIN)
    golds = {prompt.task.payload["gold"] for prompt in (*problems.train, *problems.heldout)}
    assert {"72", "1080", "10000", "12000", "-7", "-47"} <= golds


def test_the_task_says_how_answers_are_found() -> None:
    for template, extractor in (("dapo", "answer_line"), ("r1_zero", "answer_tags"), ("gsm8k", "hash_line")):
        problems, _ = load(replace(TRAIN, template=template))
        prompt = problems.train[0]
        assert prompt.task.kind == "math"
        assert prompt.task.payload["extractor"] == extractor
        assert grade(prompt.task.payload, written(prompt.answer_ids[:-1])).score == 1.0


def test_the_split_is_a_matter_of_the_text_alone() -> None:
    first, _ = load(TRAIN)
    other, _ = load(replace(TRAIN, template="none"))
    assert [prompt.id for prompt in first.heldout] == [prompt.id for prompt in other.heldout]
    assert load(TRAIN)[0] == first


def test_stops_of_the_template_end_responses() -> None:
    assert load(replace(TRAIN, template="plain_question"))[0].stop_ids == {ord("\n")}


def test_an_evaluation_set_of_its_own() -> None:
    problems, said = load(replace(TRAIN, evaluation=str(GSM8K / "test-sample.jsonl"), evaluation_adapter="gsm8k"))
    assert (len(problems.train), len(problems.heldout)) == (30, 8)
    assert len(said[-1].splitlines()) >= 2
    problems, said = load(replace(TRAIN, evaluation=TRAIN.path, holdout=0.5, path=str(GSM8K / "*.jsonl")))
    assert (len(problems.train), len(problems.heldout)) == (8, 30)
    assert "overlap                     30 left out" in said[-1]


def write(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_an_evaluation_set_may_repeat_its_problems(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *[{"problem": "What is 5+5?", "answer": "010"}] * 4)
    config = replace(TRAIN, evaluation=path, evaluation_adapter="aime")
    problems, _ = load(replace(config, evaluation_repeats=True))
    assert [prompt.task.payload["gold"] for prompt in problems.heldout] == ["10"] * 4
    problems, said = load(config)
    assert len(problems.heldout) == 1
    assert "duplicate                    3 left out" in said[-1]


def test_named_columns_hold_for_both_sets_and_each_of_several_golds_is_right(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", {"q": "What is half of one?", "gold": ["1/2", "half of it"]})
    test = write(tmp_path / "b.jsonl", {"q": "What is half of two?", "gold": 1})
    config = FileData(path=train, evaluation=test, columns={"prompt": "q", "answer": "gold"})
    problems, _ = load(config)
    payload = problems.train[0].task.payload
    assert payload == {"gold": ["1/2", "half of it"], "extractor": "boxed"}
    assert [grade(payload, f"\\boxed{{{answer}}}").score for answer in ("0.5", "half of it", "0.4")] == [1.0, 1.0, 0.0]
    assert problems.heldout[0].task.payload["gold"] == "1"
    with pytest.raises(DataError, match="b.jsonl: no column 'prompt'; it has 'q', 'gold'"):
        load(replace(config, evaluation_adapter="plain"))


def test_a_tolerance_reaches_the_verifier(tmp_path: Path) -> None:
    path = write(tmp_path / "minerva.jsonl", {"question": "How fast is light?", "answer": "3e8"})
    (prompt,) = load(replace(TRAIN, evaluation_adapter="minerva", evaluation=path))[0].heldout
    assert prompt.task.payload == {"gold": "3e8", "extractor": "boxed", "tolerance": 0.01}
    assert grade(prompt.task.payload, "\\boxed{2.99e8}").score == 1.0
    assert grade(prompt.task.payload, "\\boxed{2.9e8}").score == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"adapter": "eurus2_code"},
            "data.template boxed_user asks for a final answer, but the answers of data.adapter eurus2_code are a "
            "program; choose another template: python_block",
        ),
        ({"evaluation": "x", "evaluation_adapter": "eurus2_code"}, "the answers of data.adapter eurus2_code"),
        ({"template": "python_block"}, "the answers of data.adapter gsm8k are a final answer; .*: none, boxed_user"),
        ({"adapter": "plain"}, "no column 'prompt'; it has 'question', 'answer'"),
        ({"path": "none.jsonl"}, "none.jsonl: no such file"),
        ({"path": str(GSM8K)}, "holds the splits test, train"),
        ({"template": "qwen_boxed"}, "which is 10 tokens for this model"),
        (
            {"max_prompt_tokens": 3},
            "(?s)0 problems are left to train on and 0 to evaluate on.*long_prompt +30 left out",
        ),
        ({"max_prompt_tokens": 300, "strict": True}, r"(?s)data.strict: \d+ rows would be left out.*long_prompt"),
        ({"holdout": 1e-9}, "30 problems are left to train on and 0 to evaluate on"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(replace(TRAIN, **changes))


def test_strict_accepts_sound_data() -> None:
    assert load(replace(TRAIN, strict=True))[0] == load(TRAIN)[0]


def inspect(*arguments: str) -> int:
    return main(["data", "inspect", *arguments])


def test_inspect_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(TRAIN.path, "--adapter", "gsm8k", "--strict") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{TRAIN.path}: 30 rows, 30 kept, 0 left out"
    assert shown[-1] == "prompt lengths and characters: not checked, as no model is named"


def test_strict_inspection_fails_on_rows_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(FAULTS), "--adapter", "eurus2_math", "--evaluation", str(FAULTS.parent / "evaluation.jsonl"))
    assert inspect(*arguments) == 0
    assert inspect(*arguments, "--strict") == 3
    assert "duplicate                    1 left out  e.g. faults.jsonl row 13" in capsys.readouterr().out


def test_inspect_measures_prompts_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_tiny(TinyModel(alphabet="0123456789+ ?Whatis\\boxed{}"), tmp_path / "model", seed=1)
    path = write(
        tmp_path / "rows.jsonl", {"q": "What is 1+1?", "a": 2}, {"q": "What is 10+10?", "a": 20}, {"q": "Why?", "a": 1}
    )
    columns = ("--column", "prompt=q", "--column", "answer=a", "--template", "none")
    assert inspect(path, *columns, "--model", str(tmp_path / "model"), "--max-prompt-tokens", "13") == 0
    shown = capsys.readouterr().out
    assert "rows.jsonl row 2: 14 tokens, and 13 are the limit" in shown
    assert "not in the model's alphabet: ['y']" in shown
    assert shown.endswith("prompt lengths: 12 to 12 tokens, half of them at most 12\n")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["none.jsonl"], 3, "none.jsonl: no such file or folder"),
        ([TRAIN.path, "--column", "question=q"], 2, "--column: must be names of columns, for `prompt` and `answer`"),
        ([TRAIN.path, "--column", "prompt"], 2, "--column: must be names of columns"),
        ([TRAIN.path, "--max-prompt-tokens", "0"], 2, "--max-prompt-tokens: must be >= 1 (got 0)"),
        ([TRAIN.path, "--max-prompt-tokens", "9"], 2, "--max-prompt-tokens: needs --model too"),
        ([TRAIN.path, "--chat"], 2, "--chat: needs --model too"),
        ([TRAIN.path, "--evaluation-repeats"], 2, "--evaluation-repeats: needs --evaluation too"),
        ([TRAIN.path, "--model", "none"], 2, "none"),
    ],
)
def test_inspect_names_mistakes(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(*arguments) == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["data"], ["data", "inspect"], ["data", "inspect", "a", "b=c"], ["data", "look"]]
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
