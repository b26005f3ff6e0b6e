"""Tests of known sets of programming problems, from rows as their publishers give them to tasks and problems."""

import base64
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from gppo_megatron.config.schema import FileData, TemplateName
from gppo_megatron.data.files.adapters import ADAPTERS, reader_for
from gppo_megatron.data.files.faults import UnusableRowError
from gppo_megatron.data.files.program_sets import LARGEST_TESTS_BYTES
from gppo_megatron.data.files.programs import COMPARISON
from gppo_megatron.data.files.source import load_problems
from tests.unit.code_points import CodePoints, written
from tests.unit.program_rows import APPS, CALL, HUMAN_EVAL, MBPP, PROGRAM, SANITIZED, STDIN, livecodebench, packed


def read(name: str, row: dict[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """The problem's text, the judge's payload, and the solution."""
    problem = reader_for(ADAPTERS[name], {}, Path("a.jsonl"), tuple(row)).read(row)
    [gold] = problem.golds
    return problem.text, json.loads(gold), problem.solution


def test_livecodebench_reads_public_and_private_tests_of_both_kinds() -> None:
    text, payload, solution = read("livecodebench", livecodebench([STDIN], packed(json.dumps([CALL, STDIN]))))
    stdin = {"kind": "stdin", "stdin": "1 2\n", "expected": "3\n"}
    call = {"kind": "call", "function": "shift", "arguments": [[1, 2], 3], "expected": [4, 5]}
    assert payload == {"tests": [stdin, call, stdin], "comparison": dict(COMPARISON)}
    assert (text, solution) == ("Add.", None)
    starter = "class Solution:\n    def shift(self, a, b):\n        "
    text, payload, _ = read("livecodebench", livecodebench([], json.dumps([CALL]), starter_code=starter))
    assert payload["tests"] == [call]
    assert text == f"Add.\n\nUse this code as the beginning:\n{starter.rstrip()}"


class Hostile:
    """Would make a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnusableRowError, match="it names (posix|nt).mkdir"):
        read("livecodebench", livecodebench([], packed(Hostile(tmp_path / "made"))))
    assert not (tmp_path / "made").exists()


def test_a_bomb_is_not_unpacked() -> None:
    inflated = zlib.compressobj()
    blocks = [inflated.compress(bytes(1 << 20)) for _ in range((LARGEST_TESTS_BYTES >> 20) + 1)]
    bomb = base64.b64encode(b"".join([*blocks, inflated.flush()])).decode()
    with pytest.raises(UnusableRowError, match="cut, or larger than"):
        read("livecodebench", livecodebench([], bomb))


@pytest.mark.parametrize(
    ("row", "fault", "message"),
    [
        (livecodebench([STDIN], ""), "missing_gold", "no private tests"),
        (livecodebench([], packed("[]")), "missing_gold", "no tests"),
        (livecodebench([], "!"), "malformed_row", "cannot be read"),
        (livecodebench([], packed("[]")[:-8]), "malformed_row", "cannot be read|cut"),
        (livecodebench([], packed(["x"])), "malformed_row", "are a list, not text"),
        (livecodebench([], base64.b64encode(zlib.compress(b"\x80")).decode()), "malformed_row", "cannot be read"),
        (livecodebench([], '[{"input": "1"}]'), "malformed_row", "of no known form"),
        (livecodebench([CALL], "[]", metadata="{}"), "malformed_row", "of no known form"),
        (livecodebench([CALL | {"output": "x"}], "[]"), "malformed_row", "the output: 'x' is not JSON"),
    ],
)
def test_a_row_of_livecodebench_without_tests_says_why(row: dict[str, Any], fault: str, message: str) -> None:
    with pytest.raises(UnusableRowError, match=message) as caught:
        read("livecodebench", row)
    assert caught.value.finding.fault == fault


def test_human_eval_is_its_check_with_the_prompts_other_functions() -> None:
    text, payload, solution = read("human_eval", HUMAN_EVAL)
    assert text == f"Complete this function:\n\n{HUMAN_EVAL['prompt']}"
    assert solution == HUMAN_EVAL["prompt"] + HUMAN_EVAL["canonical_solution"]
    [test] = payload["tests"]
    assert (test["kind"], test["function"]) == ("assert", "twice")
    surroundings: dict[str, Any] = {}
    exec(test["setup"], surroundings)
    assert surroundings["helper"](1) == 2
    exec(str(solution), surroundings)
    exec(test["code"], surroundings)
    surroundings["twice"] = lambda x: x
    with pytest.raises(AssertionError):
        exec(test["code"], surroundings)
    with pytest.raises(UnusableRowError, match="define no check"):
        read("human_eval", HUMAN_EVAL | {"test": "assert True"})


@pytest.mark.parametrize("row", [MBPP, SANITIZED], ids=["full", "sanitized"])
def test_mbpp_is_its_asserts_about_the_function_that_they_call(row: dict[str, Any]) -> None:
    text, payload, solution = read("mbpp", row)
    asserts = list(map(str, MBPP["test_list"]))  # type: ignore[call-overload]
    assert text == "\n".join(["Write a function to double.", "", "These must hold:", *asserts])
    assert payload["tests"] == [
        {"kind": "assert", "function": "double", "code": code, "setup": "import math"} for code in asserts
    ]
    assert solution == MBPP["code"]
    with pytest.raises(UnusableRowError, match="call no function that the solution defines"):
        read("mbpp", row | {"code": "def other(): pass"})
    with pytest.raises(UnusableRowError, match="not Python"):
        read("mbpp", row | {"code": "def"})


def test_apps_and_taco_show_the_code_to_begin_with() -> None:
    text, payload, _ = read("apps", APPS)
    assert text == "Add.\n\nUse this code as the beginning:\nclass Solution:\n    def add(self, a, b):"
    assert payload["tests"] == [{"kind": "call", "function": "add", "arguments": [1, 2], "expected": 3}]
    with pytest.raises(UnusableRowError, match="the tests are not"):
        read("apps", APPS | {"input_output": "no"})
    with pytest.raises(UnusableRowError, match="input_output is empty"):
        read("apps", APPS | {"input_output": None})


@pytest.mark.parametrize(("template", "around"), [("bare_program", "{}"), ("python_block", "```python\n{}\n```")])
def test_a_known_solution_is_what_warm_up_learns(tmp_path: Path, template: TemplateName, around: str) -> None:
    tests = json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [3]})
    rows = [{"prompt": f"{n}>", "solution": f"f=lambda x:{n}" if n else None, "tests": tests} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps(PROGRAM) + "\n")
    config = FileData(
        path=str(tmp_path / "b.jsonl"),
        adapter="programs",
        template=template,
        evaluation=str(tmp_path / "a.jsonl"),
        evaluation_adapter="programs",
    )
    problems = load_problems(config, CodePoints(), lambda line: None)
    solutions = [written(prompt.answer_ids[:-1]) for prompt in problems.heldout]
    assert solutions == ["", *(around.format(f"f=lambda x:{n}") for n in (1, 2))]
    assert {prompt.task.payload["answer"] for prompt in problems.heldout} == {"whole" if around == "{}" else "fenced"}
