"""The tests of known sets of programming problems, each in the form its publishers give them, as tasks of the judge."""

import ast
import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Sequence
from typing import Any

from gppo_verifiers.types import Task

from gppo_megatron.data.files.faults import UnusableRowError, excerpt
from gppo_megatron.data.files.programs import COMPARISON

LARGEST_TESTS_BYTES = 1 << 30


class TextUnpickler(pickle.Unpickler):
    """Reads plain values: whatever would name a class, a function or a resource is an error."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, identity: Any) -> Any:
        raise pickle.UnpicklingError("it names something outside")


def livecodebench_task(public: str, private: Any, metadata: Any) -> Task:
    """All tests of a LiveCodeBench row. Raises UnusableRowError.

    public, and private as older releases have it: JSON of [{input, output, testtype}]. Newer private tests are that
    JSON, pickled, compressed by zlib, in base 64. metadata: JSON that names the function which `functional` tests call;
    the input of those has an argument in JSON on each line.
    """
    if not isinstance(private, str) or not private.strip():
        raise UnusableRowError("missing_gold", "there are no private tests")
    function = _json("metadata", metadata).get("func_name") if isinstance(metadata, str) else None
    given = [*_listed("public_test_cases", public), *_listed("private_test_cases", _unpacked(private))]
    if not given:
        raise UnusableRowError("missing_gold", "there are no tests")
    return Task("code", {"tests": [_livecodebench_test(each, function) for each in given], "comparison": COMPARISON})


def human_eval_task(test: str, prompt: Any, function: Any) -> Task:
    """`check(function)` of a HumanEval row, which `test` defines; `prompt` may define functions besides. Raises
    UnusableRowError."""
    if not isinstance(prompt, str) or not isinstance(function, str) or not function.isidentifier():
        raise UnusableRowError("malformed_row", f"prompt or entry_point is no text: {excerpt(str(function))}")
    if "def check(" not in test:
        raise UnusableRowError("missing_gold", f"the tests define no check: {excerpt(test)}")
    code, setup = f"{test}\ncheck({function})\n", f"{prompt}\n    pass\n"
    return Task("code", {"tests": [{"kind": "assert", "function": function, "code": code, "setup": setup}]})


def mbpp_task(asserts: Sequence[str], solution: Any, setup: Any, imports: Any) -> Task:
    """The asserts of an MBPP row, each a test, of the function of its solution that they call. Raises UnusableRowError.

    setup: of the full set, a text; imports: of the sanitized one, a list. Either may be missing.
    """
    function = _called(asserts, solution)
    lines = [*(imports if isinstance(imports, list) else []), *([setup] if setup else [])]
    before = "\n".join(map(str, lines))
    return Task(
        "code",
        {"tests": [{"kind": "assert", "function": function, "code": code, "setup": before} for code in asserts]},
    )


def _unpacked(private: str) -> str:
    if private.lstrip().startswith("["):
        return private
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(private, validate=True), LARGEST_TESTS_BYTES)
        if not inflater.eof:
            raise UnusableRowError("malformed_row", f"private tests that are cut, or larger than {LARGEST_TESTS_BYTES}")
        text = TextUnpickler(io.BytesIO(data)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError) as error:
        raise UnusableRowError("malformed_row", f"the private tests cannot be read: {excerpt(str(error))}") from None
    if not isinstance(text, str):
        raise UnusableRowError("malformed_row", f"the private tests are a {type(text).__name__}, not text")
    return text


def _livecodebench_test(given: Any, function: Any) -> dict[str, Any]:
    match given:
        case {"input": str(stdin), "output": str(expected), "testtype": "stdin"}:
            return {"kind": "stdin", "stdin": stdin, "expected": expected}
        case {"input": str(lines), "output": str(expected), "testtype": "functional"} if isinstance(function, str):
            arguments = [_json("an argument", line) for line in lines.split("\n") if line.strip()]
            return {
                "kind": "call",
                "function": function,
                "arguments": arguments,
                "expected": _json("the output", expected),
            }
    raise UnusableRowError("malformed_row", f"a test is of no known form: {excerpt(str(given))}")


def _called(asserts: Sequence[str], solution: Any) -> str:
    """The last function that the solution defines and the asserts call."""
    try:
        names = {
            node.func.id
            for node in ast.walk(ast.parse("\n".join(asserts)))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        defined = [node.name for node in ast.parse(str(solution)).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnusableRowError("malformed_row", f"not Python: {excerpt(str(error))}") from None
    called = [name for name in defined if name in names]
    if not called:
        raise UnusableRowError("malformed_row", "the asserts call no function that the solution defines")
    return called[-1]


def _listed(name: str, text: str) -> list[Any]:
    given = _json(name, text)
    if not isinstance(given, list):
        raise UnusableRowError("malformed_row", f"{name} is a {type(given).__name__}, not a list")
    return given


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableRowError("malformed_row", f"{name}: {excerpt(text)} is not JSON: {error}") from None
