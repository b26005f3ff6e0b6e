"""A task's payload and a model's answer -> the job to judge.

A payload is plain data:

    {"tests": [{"kind": "stdin", "stdin": "1 2", "expected": "3"},
               {"kind": "call", "function": "add", "arguments": [1, 2], "expected": 3},
               {"kind": "assert", "function": "add", "code": "assert add(1, 2) == 3", "setup": ""},
               {"kind": "checker", "stdin": "", "checker": "def check(stdin, stdout, expected): ...", "expected": ""}],
     "language": "python", "answer": "fenced", "score": "all",
     "comparison": {"mode": "lines", "absolute": 1e-6, "relative": 1e-6},
     "cpu_seconds": 4.0, "total_cpu_seconds": 60.0, "memory_bytes": 536870912}

Only `tests` must be there.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, get_args

from gppo_verifiers.code.extract import last_block
from gppo_verifiers.code.languages import LANGUAGES
from gppo_verifiers.code.types import AssertTest, CallTest, CheckerTest, Comparison, Job, Mode, StdinTest, Test
from gppo_verifiers.math.extract import after_thinking
from gppo_verifiers.sandbox.base import Limits

KINDS: Mapping[str, type[Test]] = {
    "stdin": StdinTest,
    "call": CallTest,
    "assert": AssertTest,
    "checker": CheckerTest,
}
KEYS = frozenset(
    {"tests", "language", "answer", "score", "comparison", "cpu_seconds", "total_cpu_seconds", "memory_bytes"}
)
WALL_PER_CPU, LEAST_WALL_SECONDS = 4.0, 10.0


def job_of(
    payload: Mapping[str, Any], text: str, limits: Limits, languages: Collection[str] = tuple(LANGUAGES)
) -> Job | None:
    """The job; None where the answer holds no program. Raises ValueError for a payload that is none.

    limits: what the payload does not set. languages: those that may be asked for.
    """
    unknown = set(payload) - KEYS
    if unknown:
        raise ValueError(f"a task has no {', '.join(sorted(unknown))}")
    language = payload.get("language", "python")
    if language not in languages:
        raise ValueError(f"no language {language!r} here; there is {', '.join(languages)}")
    tests = tuple(_test(test) for test in payload.get("tests", ()))
    score = payload.get("score", "all")
    if score not in ("all", "share"):
        raise ValueError(f"a score is `all` or `share`, not {score!r}")
    source = _program(payload.get("answer", "fenced"), text, language)
    if source is None:
        return None
    comparison, total = _comparison(payload.get("comparison", {})), float(payload.get("total_cpu_seconds", math.inf))
    return Job(source, tests, language, comparison, _limits(payload, limits), score, total)


def wall_seconds(cpu_seconds: float) -> float:
    """How long a run may take whose CPU limit is that."""
    return max(LEAST_WALL_SECONDS, WALL_PER_CPU * cpu_seconds)


def _program(where: str, text: str, language: str) -> str | None:
    match where:
        case "fenced":
            return last_block(text, LANGUAGES[language].names)
        case "whole":
            return after_thinking(text)
    raise ValueError(f"an answer is `fenced` or `whole`, not {where!r}")


def _test(given: Mapping[str, Any]) -> Test:
    fields = dict(given)
    name = fields.pop("kind", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"a test has a kind of {', '.join(KINDS)}: {str(given)[:100]}")
    try:
        test = kind(**fields)
    except TypeError as error:
        raise ValueError(f"a test is incomplete: {error}") from None
    for key, value in fields.items():
        wanted = (object if key == "expected" else list) if kind is CallTest and key != "function" else str
        if not isinstance(value, wanted):
            raise ValueError(f"the {key} of a test is a {type(value).__name__}, not a {wanted.__name__}")
    return test


def _comparison(given: Mapping[str, Any]) -> Comparison:
    try:
        comparison = Comparison(**given)
    except TypeError as error:
        raise ValueError(f"no comparison: {error}") from None
    if comparison.mode not in get_args(Mode):
        raise ValueError(f"a comparison is one of {', '.join(get_args(Mode))}, not {comparison.mode!r}")
    return comparison


def _limits(payload: Mapping[str, Any], limits: Limits) -> Limits:
    cpu_seconds = float(payload.get("cpu_seconds", limits.cpu_seconds))
    return replace(
        limits,
        cpu_seconds=cpu_seconds,
        wall_seconds=wall_seconds(cpu_seconds),
        memory_bytes=int(payload.get("memory_bytes", limits.memory_bytes)),
    )
