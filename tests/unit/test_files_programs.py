"""Tests of programming problems, from the text of a data set to a task."""

import json
from pathlib import Path
from typing import Any

import pytest

from gppo_megatron.config.schema import FileData
from gppo_megatron.data.files.faults import UnusableRowError
from gppo_megatron.data.files.programs import COMPARISON, program_task
from gppo_megatron.data.files.source import judges_programs, load_problems
from tests.unit.code_points import CodePoints, written

AFTER = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."


def row(problem: str, tests: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": problem + AFTER}],
        "ability": "code",
        "reward_model": {"ground_truth": json.dumps(tests), "style": "rule"},
    }


STDIN = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7"]}
CALL = {"fn_name": "add", "inputs": [[1, 2], [[3], None]], "outputs": [[3], "x"]}


def test_programs_that_read_and_print() -> None:
    task = program_task(json.dumps(STDIN))
    assert task.kind == "code"
    assert task.payload == {
        "tests": [
            {"kind": "stdin", "stdin": "1 2\n", "expected": "3\n"},
            {"kind": "stdin", "stdin": "3\n4", "expected": "7"},
        ],
        "comparison": COMPARISON,
    }


def test_functions_that_are_called() -> None:
    assert program_task(json.dumps(CALL)).payload["tests"] == [
        {"kind": "call", "function": "add", "arguments": [1, 2], "expected": [3]},
        {"kind": "call", "function": "add", "arguments": [[3], None], "expected": "x"},
    ]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"inputs": ["1"]}, "outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "2 inputs and 1 outputs"),
        ({"inputs": "1", "outputs": "1"}, "no lists"),
        ({"inputs": [1], "outputs": ["1"]}, "a int is no text"),
        ({"inputs": [[1]], "outputs": ["1"]}, "a list is no text"),
        ({"fn_name": "f", "inputs": ["[1]"], "outputs": [1]}, "the arguments of f are a str"),
        ({"fn_name": "f(", "inputs": [[1]], "outputs": [1]}, "fn_name is 'f\\('"),
    ],
)
def test_what_is_no_test_says_why(tests: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableRowError, match=message):
        program_task(json.dumps(tests))


@pytest.mark.parametrize("text", ["", "x", "[]", "[" * 100_000, "1"])
def test_what_is_no_json_object_is_unusable(text: str) -> None:
    with pytest.raises(UnusableRowError, match="the tests are not"):
        program_task(text)


def test_a_set_of_programming_problems_is_written_and_has_no_reference_answers(tmp_path: Path) -> None:
    rows = [row("Add.", STDIN), row("Call.", CALL), row("Bad.", {"inputs": ["1"], "outputs": []}), row("Add.", STDIN)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps(row("Held out.", STDIN)) + "\n")
    config = FileData(
        path=str(path), adapter="eurus2_code", template="python_block", evaluation=str(tmp_path / "test.jsonl")
    )
    assert judges_programs(config)
    said: list[str] = []
    problems = load_problems(config, CodePoints(), said.append)
    assert [written(prompt.token_ids) for prompt in problems.train] == [
        f"{problem}\n\nSolve the problem with a Python program. Give the whole program in one block that begins with "
        "```python and ends with ```."
        for problem in ("Add.", "Call.")
    ]
    assert [prompt.task.payload for prompt in problems.train] == [
        {**program_task(json.dumps(tests)).payload, "answer": "fenced"} for tests in (STDIN, CALL)
    ]
    assert {prompt.answer_ids for prompt in problems.train} == {()}
    assert "malformed_row                1 left out" in said[-1]
    assert "duplicate                    1 left out" in said[-1]


def test_problems_of_mathematics_need_no_sandbox() -> None:
    assert not judges_programs(FileData(path="x", adapter="gsm8k"))
    assert judges_programs(FileData(path="x", adapter="gsm8k", evaluation="y", evaluation_adapter="eurus2_code"))
