"""Rows of sets of programming problems as their publishers give them, and what is read from them."""

import base64
import json
import pickle
import zlib
from typing import Any

from gppo_megatron.data.files.programs import COMPARISON


def packed(value: Any) -> str:
    """As LiveCodeBench packs its private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


STDIN = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
CALL = {"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}


def livecodebench(public: list[Any], private: str, **changes: Any) -> dict[str, Any]:
    return {
        "question_title": "A. Short Sort",
        "question_content": "Add.",
        "platform": "leetcode",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(public),
        "private_test_cases": private,
        "metadata": json.dumps({"func_name": "shift"}),
    } | changes


HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def helper(x):\n    return x + 1\n\n\ndef twice(x):\n    """2 * x"""\n',
    "entry_point": "twice",
    "canonical_solution": "    return helper(x) + x - 1\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to double.",
    "code": "import math\r\ndef half(x):\r\n    return x / 2\r\ndef double(x):\r\n    return x / half(1)",
    "test_list": ["assert double(2) == 4", "assert math.isclose(double(0.5), 1)"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
SANITIZED = {
    "prompt": "Write a function to double.",
    "code": MBPP["code"],
    "test_imports": ["import math"],
    "test_list": MBPP["test_list"],
}
APPS = {
    "problem_id": 7,
    "question": "Add.",
    "solutions": "[]",
    "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}),
    "starter_code": "class Solution:\n    def add(self, a, b):\n        ",
}
PROGRAM = {
    "prompt": "+3>",
    "solution": "f=lambda x:x+3",
    "tests": json.dumps({"fn_name": "f", "inputs": [[0]], "outputs": [3]}),
}


def call(function: str, arguments: list[Any], expected: Any) -> dict[str, Any]:
    test = {"kind": "call", "function": function, "arguments": arguments, "expected": expected}
    return {"tests": [test], "comparison": dict(COMPARISON)}


def asserts(function: str, setup: str, *codes: str) -> dict[str, Any]:
    return {"tests": [{"kind": "assert", "function": function, "code": code, "setup": setup} for code in codes]}


DOUBLE = asserts("double", "import math", "assert double(2) == 4", "assert math.isclose(double(0.5), 1)")
DOUBLE_TEXT = (
    "Write a function to double.\n\nThese must hold:\nassert double(2) == 4\nassert math.isclose(double(0.5), 1)"
)
CHECK = asserts(
    "twice",
    'def helper(x):\n    return x + 1\n\n\ndef twice(x):\n    """2 * x"""\n\n    pass\n',
    "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\ncheck(twice)\n",
)

ROWS: list[tuple[str, dict[str, Any], str, dict[str, Any], Any]] = [
    ("programs", PROGRAM, "+3>", call("f", [0], 3), "f=lambda x:x+3"),
    (
        "apps",
        APPS,
        "Add.\n\nUse this code as the beginning:\nclass Solution:\n    def add(self, a, b):",
        call("add", [1, 2], 3),
        None,
    ),
    (
        "livecodebench",
        livecodebench([], packed(json.dumps([CALL]))),
        "Add.",
        call("shift", [[1, 2], 3], [4, 5]),
        None,
    ),
    (
        "human_eval",
        HUMAN_EVAL,
        f"Complete this function:\n\n{HUMAN_EVAL['prompt']}",
        CHECK,
        HUMAN_EVAL["prompt"] + HUMAN_EVAL["canonical_solution"],
    ),
    ("mbpp", MBPP, DOUBLE_TEXT, DOUBLE, MBPP["code"]),
    ("mbpp", SANITIZED, DOUBLE_TEXT, DOUBLE, MBPP["code"]),
]
"""(adapter, row, the problem's text, the judge's payload, the solution)"""
