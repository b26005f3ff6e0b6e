"""Rows of each known data set, in the form its publishers give them, to a problem and its answer."""

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gppo_megatron.config.schema import AdapterName
from gppo_megatron.data.files.adapters import ADAPTERS, Problem, reader_for
from gppo_megatron.data.files.faults import UnusableRowError
from gppo_megatron.data.files.programs import COMPARISON
from gppo_megatron.data.files.readers import columns_of, read_rows
from gppo_megatron.errors import DataError
from tests.unit.program_rows import ROWS

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
EURUS_AFTER = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
CODE_AFTER = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
TESTS = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
PAYLOAD = json.dumps(
    {"tests": [{"kind": "stdin", "stdin": "1 2\n", "expected": "3\n"}], "comparison": dict(COMPARISON)},
)


def dapo(problem: str, gold: str = "34") -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO_BEFORE + problem + DAPO_AFTER, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": gold, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    }


def eurus(problem: str, gold: str, ability: str, after: str) -> dict[str, Any]:
    return {
        "data_source": "numina_olympiads",
        "prompt": [{"content": "Use [ASSESS].", "role": "system"}, {"content": problem + after, "role": "user"}],
        "ability": ability,
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": {"index": 7, "split": "train"},
    }


def olympiad(**changes: Any) -> dict[str, Any]:
    row = {
        "id": 2498,
        "question": "Find $k$.",
        "solution": ["So $k=2$."],
        "final_answer": ["$2$"],
        "context": None,
        "modality": "Text-only",
        "is_multiple_answer": False,
        "unit": None,
        "answer_type": "Numerical",
        "error": None,
    }
    return row | changes


# adapter, the row as published, the problem in it
CASES: list[tuple[str, dict[str, Any], Problem]] = [
    ("plain", {"prompt": "What is 1+1?", "answer": "2"}, Problem("What is 1+1?", ("2",))),
    ("plain", {"prompt": "What is 1+1?", "answer": 2}, Problem("What is 1+1?", ("2",))),
    ("plain", {"prompt": "What?", "answer": " \x0crac{1}{2}\r\n"}, Problem("What?", ("\x0crac{1}{2}",))),
    ("gsm8k", {"question": "How many?", "answer": "Five.\r\n#### 5\r\n"}, Problem("How many?", ("5",))),
    ("plain", {"prompt": "Half?", "answer": ["1/2", "0.5"]}, Problem("Half?", ("1/2", "0.5"))),
    ("plain", {"prompt": "x in?", "answer": "[1,2]"}, Problem("x in?", ("[1,2]",))),
    (
        "gsm8k",
        {"question": "How many?", "answer": "48/2 = <<48/2=24>>24 #### not this\n#### 1,024,000"},
        Problem("How many?", ("1024000",)),
    ),
    ("gsm8k", {"question": "How many?", "answer": "Fewer.\n#### -7"}, Problem("How many?", ("-7",))),
    (
        "math500",
        {"problem": "Polar?", "solution": "\\boxed{x}", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "level": 2},
        Problem("Polar?", ("\\left( 3, \\frac{\\pi}{2} \\right)",)),
    ),
    (
        "math500",
        {"problem": "Half?", "level": "Level 5", "type": "Algebra", "solution": "\\boxed{3} no \\boxed{\\frac{1}{2}}."},
        Problem("Half?", ("\\frac{1}{2}",)),
    ),
    ("aime", {"id": 60, "problem": "N?", "solution": "...", "answer": "033", "year": "2024"}, Problem("N?", ("33",))),
    ("aime", {"id": 60, "problem": "N?", "solution": "So \\boxed{204}.", "url": ""}, Problem("N?", ("204",))),
    ("aime", {"question": "N?", "answer": "336^\\circ"}, Problem("N?", ("336",))),
    ("aime", {"question": "N?", "answer": "000"}, Problem("N?", ("0",))),
    ("amc", {"id": 0, "question": "N?", "answer": "27.0", "url": ""}, Problem("N?", ("27",))),
    ("amc", {"id": 0, "question": "N?", "answer": 27.0, "url": ""}, Problem("N?", ("27",))),
    ("amc", {"id": 0, "question": "N?", "answer": "2.50", "url": ""}, Problem("N?", ("2.50",))),
    ("olympiadbench", olympiad(), Problem("Find $k$.", ("2",))),
    ("olympiadbench", olympiad(final_answer='["$2,3$"]'), Problem("Find $k$.", ("2,3",))),
    ("olympiadbench", olympiad(final_answer=["2", "$3$"]), Problem("Find $k$.", ("2, 3",))),
    ("olympiadbench", olympiad(context="Let $j=1$."), Problem("Let $j=1$.\n\nFind $k$.", ("2",))),
    ("olympiadbench", olympiad(error="1e-1"), Problem("Find $k$.", ("2",), 0.05)),
    (
        "minerva",
        {"question": "How bright?", "answer": "4.5e33"},
        Problem("How bright?", ("4.5e33",), 0.01),
    ),
    (
        "minerva",
        {"problem": "How heavy?", "solution": "It is \\boxed{6\\times 10^{13}} g.", "type": "Astronomy", "idx": 3},
        Problem("How heavy?", ("6\\times 10^{13}",), 0.01),
    ),
    ("deepscaler", {"problem": "Cost?", "answer": "26", "solution": ""}, Problem("Cost?", ("26",))),
    ("dapo_math", dapo("SolvedSome $x$.Rr"), Problem("SolvedSome $x$.Rr", ("34",))),
    ("eurus2_math", eurus("Find $x$.", "\\sqrt{2}", "math", EURUS_AFTER), Problem("Find $x$.", ("\\sqrt{2}",))),
    ("eurus2_code", eurus("Add.", TESTS, "code", CODE_AFTER), Problem("Add.", (PAYLOAD,))),
    *(
        (name, row, Problem(text, (json.dumps(payload),), solution=solution))
        for name, row, text, payload, solution in ROWS
    ),
]
IDS = [f"{name}-{place}" for place, (name, _, _) in enumerate(CASES)]


def read(name: str, row: dict[str, Any]) -> Problem:
    return reader_for(ADAPTERS[name], {}, Path("data.jsonl"), tuple(row)).read(row)


@pytest.mark.parametrize(("name", "row", "problem"), CASES, ids=IDS)
def test_a_row_as_published(name: str, row: dict[str, Any], problem: Problem) -> None:
    assert read(name, row) == problem


@pytest.mark.parametrize(("name", "row", "problem"), CASES, ids=IDS)
def test_a_row_out_of_parquet(tmp_path: Path, name: str, row: dict[str, Any], problem: Problem) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([row]), file)
    reader = reader_for(ADAPTERS[name], {}, file, columns_of(file))
    (stored,) = read_rows(file, reader.columns)
    assert set(stored.values) == set(reader.columns)
    assert reader.read(stored.values) == problem


@pytest.mark.parametrize(("name", "row", "problem"), CASES, ids=IDS)
def test_nested_columns_as_json_text(name: str, row: dict[str, Any], problem: Problem) -> None:
    nested = ("prompt", "reward_model", "extra_info", "final_answer")
    stored = {
        key: json.dumps(value) if key in nested and isinstance(value, list | dict) else value
        for key, value in row.items()
    }
    assert read(name, stored) == problem


@pytest.mark.parametrize(("name", "row", "problem"), CASES, ids=IDS)
def test_nested_columns_as_numpy_objects(name: str, row: dict[str, Any], problem: Problem) -> None:
    """What pandas makes of parquet: arrays of dicts for lists, numpy scalars for numbers."""
    stored = {}
    for key, value in row.items():
        if isinstance(value, list):
            array = np.empty(len(value), dtype=object)
            array[:] = value
            stored[key] = array
        else:
            stored[key] = np.float64(value) if isinstance(value, float) else value
    assert read(name, stored) == problem


@pytest.mark.parametrize(("name", "row", "problem"), CASES, ids=IDS)
def test_a_file_that_pandas_wrote_and_the_rows_that_pandas_reads(
    tmp_path: Path, name: str, row: dict[str, Any], problem: Problem
) -> None:
    file = tmp_path / "a.parquet"
    pd.DataFrame([row]).to_parquet(file)
    reader = reader_for(ADAPTERS[name], {}, file, columns_of(file))
    (stored,) = read_rows(file, reader.columns)
    assert reader.read(stored.values) == problem
    assert read(name, pd.read_parquet(file).to_dict("records")[0]) == problem


def test_there_is_an_adapter_for_every_name_and_a_case_for_every_adapter() -> None:
    assert set(ADAPTERS) == set(get_args(AdapterName)) == {name for name, _, _ in CASES}


@given(st.text())
def test_a_template_takes_no_letter_of_the_problem_along(problem: str) -> None:
    if problem.strip():
        assert read("dapo_math", dapo(problem)).text == problem


@pytest.mark.parametrize(
    ("name", "row", "fault", "detail"),
    [
        ("plain", {"prompt": None, "answer": "2"}, "missing_problem", "prompt is empty"),
        ("plain", {"prompt": [], "answer": "2"}, "missing_problem", "prompt is empty"),
        ("plain", {"prompt": 3, "answer": "2"}, "malformed_row", "prompt is a int, not text"),
        ("plain", {"prompt": '[{"role": "user"', "answer": "2"}, "malformed_row", "is not JSON"),
        ("plain", {"prompt": [{"role": "user"}], "answer": "2"}, "malformed_row", "a turn is not"),
        ("plain", {"prompt": "?", "answer": None}, "missing_gold", "answer is empty"),
        ("plain", {"prompt": "?", "answer": []}, "missing_gold", "answer is empty"),
        ("plain", {"prompt": "?", "answer": float("nan")}, "missing_gold", "answer is empty"),
        ("plain", {"prompt": "?", "answer": True}, "malformed_row", "answer is a bool"),
        ("gsm8k", {"question": "?", "answer": "It is 5."}, "missing_gold", "no #### in 'It is 5.'"),
        ("aime", {"problem": "?", "solution": "\\boxed{20"}, "missing_gold", "no \\boxed{...}"),
        ("dapo_math", dapo("?") | {"reward_model": None}, "missing_gold", "reward_model.ground_truth is empty"),
        ("dapo_math", dapo("?") | {"reward_model": "[1]"}, "malformed_row", "has no 'ground_truth'"),
        ("dapo_math", dapo("?") | {"prompt": "What is 1+1?"}, "unexpected_template", "'What is 1+1?'"),
        ("dapo_math", dapo(" "), "missing_problem", "prompt is empty"),
        ("eurus2_math", eurus("?", TESTS, "code", CODE_AFTER), "other_kind", "ability is 'code'"),
        ("eurus2_code", eurus("?", "2", "math", EURUS_AFTER), "other_kind", "ability is 'math'"),
        ("eurus2_code", eurus("?", "{}", "code", CODE_AFTER), "malformed_row", "{inputs, outputs}"),
        (
            "eurus2_code",
            eurus("?", json.dumps({"inputs": ["1"], "outputs": []}), "code", CODE_AFTER),
            "malformed_row",
            "1 inputs and 0 outputs",
        ),
        ("olympiadbench", olympiad(modality="Multimodal"), "missing_image", "needs a picture"),
        ("olympiadbench", olympiad(answer_type="Need_human_evaluate"), "missing_gold", "needs a human"),
    ],
)
def test_rows_without_a_usable_problem(name: str, row: dict[str, Any], fault: str, detail: str) -> None:
    with pytest.raises(UnusableRowError) as caught:
        read(name, row)
    assert caught.value.finding.fault == fault
    assert detail in caught.value.finding.detail


def turns(*roles: str) -> dict[str, Any]:
    return {"prompt": [{"role": role, "content": f"from {role}"} for role in roles], "answer": "2"}


@pytest.mark.parametrize(
    ("roles", "detail"),
    [
        (("user", "assistant"), "ends in a turn of the role 'assistant'"),
        (("system",), "ends in a turn of the role 'system'"),
        (("user", "system", "user"), "has the turns user, system, user"),
        (("user", "assistant", "user"), "has the turns user, assistant, user"),
        (("assistant", "user"), "has the turns assistant, user"),
    ],
)
def test_conversations_that_are_no_problem(roles: tuple[str, ...], detail: str) -> None:
    with pytest.raises(UnusableRowError, match=detail) as caught:
        read("plain", turns(*roles))
    assert caught.value.finding.fault == "bad_chat"


@pytest.mark.parametrize("roles", [("user",), ("system", "user")])
def test_conversations_that_are_a_problem(roles: tuple[str, ...]) -> None:
    assert read("plain", turns(*roles)) == Problem("from user", ("2",))


@pytest.mark.parametrize(("error", "gold"), [("1e-1", "(1, 2)"), ("0", "2"), ("small", "2"), ("0.1", "0")])
def test_an_error_that_cannot_be_applied_is_doubted(error: str, gold: str) -> None:
    problem = read("olympiadbench", olympiad(error=error, final_answer=[gold]))
    assert problem.tolerance is None
    assert [finding.fault for finding in problem.doubts] == ["unused_tolerance"]


def test_columns_are_named_by_the_user() -> None:
    row = {"q": "How many?", "meta": {"a": "5 apples\n#### 5"}, "answer": "6"}
    columns = {"prompt": "q", "answer": "meta.a"}
    reader = reader_for(ADAPTERS["gsm8k"], columns, Path("a.jsonl"), tuple(row))
    assert reader.read(row) == Problem("How many?", ("5",))
    assert reader.columns == ("q", "meta")


@pytest.mark.parametrize(
    ("name", "columns", "present", "message"),
    [
        (
            "plain",
            {},
            ("promt", "answer"),
            "a.jsonl: no column 'prompt'; it has 'promt', 'answer'; did you mean 'promt'?",
        ),
        ("aime", {}, ("text",), "a.jsonl: no column 'problem' or 'question'; it has 'text'"),
        ("plain", {"answer": "gold"}, ("prompt", "answer"), "a.jsonl: no column 'gold'; it has 'prompt', 'answer'"),
        ("eurus2_math", {}, ("prompt", "reward_model"), "a.jsonl: no column 'ability'"),
    ],
)
def test_a_missing_column_is_named(name: str, columns: dict[str, str], present: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError) as caught:
        reader_for(ADAPTERS[name], columns, Path("a.jsonl"), present)
    assert str(caught.value).startswith(message)
