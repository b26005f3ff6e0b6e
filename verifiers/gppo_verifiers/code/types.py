"""A program to judge, the tests it is judged by, and what came of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from gppo_verifiers.sandbox.base import Limits

Mode = Literal["exact", "tokens", "lines", "floats", "unordered"]


@dataclass(frozen=True)
class Comparison:
    """When an output is the expected one.

    exact: the same text. lines: the same but for blanks at the ends of lines and empty lines at the end. tokens: the
    same words, blanks apart. floats: tokens, where numbers with a point or an exponent need only be near. unordered:
    the same lines, blanks and order apart. Values of calls are compared as they are, with floats near in `floats`
    and lists in any order in `unordered`.
    absolute, relative: near means within absolute, or within relative times the expected number.
    """

    mode: Mode = "lines"
    absolute: float = 1e-6
    relative: float = 1e-6


@dataclass(frozen=True)
class StdinTest:
    """The program reads `stdin` and must print `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class CallTest:
    """`function(*arguments)` must return `expected`; all of it plain JSON-like values.

    function: a name of the program's top level, or a method of its class `Solution`.
    """

    function: str
    arguments: Sequence[Any]
    expected: Any


@dataclass(frozen=True)
class AssertTest:
    """`code`, run in a process of its own where `function` calls the program's, must end without an exception.

    setup: run before it, for what the asserts need besides; a `function` it defines is replaced.
    """

    function: str
    code: str
    setup: str = ""


@dataclass(frozen=True)
class CheckerTest:
    """The program reads `stdin`; the Python source `checker` defines `check(stdin, stdout, expected) -> bool`, all
    text, which says whether the output is right. expected: a right output, which the checker must accept."""

    stdin: str
    checker: str
    expected: str


Test = StdinTest | CallTest | AssertTest | CheckerTest


class TestStatus(Enum):
    """What came of one test."""

    __test__ = False  # not a test class of pytest

    AC = "AC"  # accepted
    WA = "WA"  # wrong answer
    RE = "RE"  # runtime error: a signal, an exit code, an exception, or an end before the answer
    CE = "CE"  # the program does not compile
    TLE = "TLE"  # used more CPU time than allowed
    ILE = "ILE"  # idle: the wall time passed with hardly any CPU used
    MLE = "MLE"  # used more memory than allowed
    OLE = "OLE"  # printed more than allowed
    SKIPPED = "SKIPPED"  # not run: an earlier test had decided
    INFRA = "INFRA"  # the sandbox failed, or the machine was too busy to tell


@dataclass(frozen=True)
class TestResult:
    """cpu_seconds and memory_peak_bytes of the program's run; detail in a few words, for people."""

    __test__ = False

    status: TestStatus
    detail: str = ""
    cpu_seconds: float = 0.0
    memory_peak_bytes: int | None = None


@dataclass(frozen=True)
class Job:
    """One program and its tests.

    language: a name in `languages.LANGUAGES`. score: `all` is 1 if every test is accepted and 0 otherwise, and stops
    at the first that is not; `share` is the share of accepted tests. total_cpu_seconds: of all tests together; the
    test that comes to it has only what is left, and those after it are skipped, which is not accepted.
    """

    source: str
    tests: tuple[Test, ...]
    language: str = "python"
    comparison: Comparison = field(default_factory=Comparison)
    limits: Limits = field(default_factory=Limits)
    score: Literal["all", "share"] = "all"
    total_cpu_seconds: float = math.inf

    def __post_init__(self) -> None:
        if not self.total_cpu_seconds > 0:
            raise ValueError(f"total_cpu_seconds must be > 0, got {self.total_cpu_seconds}")


class JobState(Enum):
    GRADED = "graded"
    INFRA_ERROR = "infra_error"  # the judge failed, not the program
    TASK_INVALID = "task_invalid"  # the tests are at fault: none, unreadable, or a checker that fails


@dataclass(frozen=True)
class Report:
    """The outcome of a job. score: in [0, 1] where it is graded, else None. results: one a test where it was run."""

    state: JobState
    score: float | None
    results: tuple[TestResult, ...] = ()
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.score is not None) != (self.state is JobState.GRADED):
            raise ValueError(f"a job that is {self.state.value} cannot have the score {self.score}")
        if self.score is not None and not 0.0 <= self.score <= 1.0:
            raise ValueError(f"a score must lie in [0, 1], got {self.score}")
