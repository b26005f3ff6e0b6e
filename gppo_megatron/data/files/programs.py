"""Tests that come with a programming problem, as data sets write them -> the task of a code judge."""

import json
from collections.abc import Mapping
from typing import Any

from gppo_verifiers.types import Task

from gppo_megatron.data.files.faults import UnusableRowError, excerpt

COMPARISON: Mapping[str, Any] = {"mode": "floats", "absolute": 1e-6, "relative": 1e-6}
"""Blanks do not count, and numbers with a point may be off a little: these sets hold what some program printed."""


def program_task(text: str) -> Task:
    """From JSON {inputs, outputs}, or {fn_name, inputs, outputs} where a function is called. Raises UnusableRowError.

    One output an input. Without fn_name both are text, or lists of lines; with it an input is a list of arguments.
    """
    try:
        given = json.loads(text)
        inputs, outputs, function = given["inputs"], given["outputs"], given.get("fn_name")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableRowError(
            "malformed_row", f"the tests are not {{inputs, outputs}}: {excerpt(str(error))}"
        ) from None
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise UnusableRowError("malformed_row", "the inputs and outputs are no lists")
    if not inputs or len(inputs) != len(outputs):
        raise UnusableRowError("malformed_row", f"{len(inputs)} inputs and {len(outputs)} outputs")
    pairs = zip(inputs, outputs, strict=True)
    if function is None:
        tests = [{"kind": "stdin", "stdin": _text(given), "expected": _text(wanted)} for given, wanted in pairs]
    elif isinstance(function, str) and function.isidentifier():
        tests = [_call(function, given, wanted) for given, wanted in pairs]
    else:
        raise UnusableRowError("malformed_row", f"fn_name is {function!a}, which is no name")
    return Task("code", {"tests": tests, "comparison": COMPARISON})


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise UnusableRowError("malformed_row", f"a {type(value).__name__} is no text to read or print")
    return value


def _call(function: str, arguments: Any, expected: Any) -> dict[str, Any]:
    if not isinstance(arguments, list):
        raise UnusableRowError("malformed_row", f"the arguments of {function} are a {type(arguments).__name__}")
    return {"kind": "call", "function": function, "arguments": arguments, "expected": expected}
