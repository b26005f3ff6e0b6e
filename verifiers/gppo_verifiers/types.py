"""The two types that cross between trainer and verifiers: a `Task` to judge against, a `Verdict` in return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol


class Status(Enum):
    """How a verdict came about. Only the first two carry a score."""

    GRADED = "graded"
    UNPARSABLE = "unparsable"  # the answer could not be read as an answer: a wrong answer, score 0
    TIMEOUT = "timeout"  # the verifier exceeded its deadline: no score
    CRASH = "crash"  # the verifier raised or died: no score
    INFRA = "infra"  # the judge itself could not run: no score


SCORED = frozenset({Status.GRADED, Status.UNPARSABLE})


@dataclass(frozen=True)
class Task:
    """What an answer is judged against.

    kind: which verifier judges it, e.g. "reasoning_gym".
    payload: the verifier's own JSON-serialisable data.
    """

    kind: str
    payload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A score in [0, 1], or None when the verifier failed: a failure is never a zero."""

    score: float | None
    status: Status
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.score is not None) != (self.status in SCORED):
            raise ValueError(f"a verdict of status {self.status.value} cannot have score {self.score}")
        if self.score is not None and not 0.0 <= self.score <= 1.0:
            raise ValueError(f"a score must lie in [0, 1], got {self.score}")


@dataclass(frozen=True)
class Answer:
    """One model answer to judge: the response's text, special tokens removed."""

    task: Task
    text: str


class Judge(Protocol):
    """Judges answers. Never raises for a bad answer or a failing verifier: that is a `Verdict` without a score."""

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        """One verdict an answer, in order. Blocks until every answer is judged or past its deadline."""
        ...

    def close(self) -> None:
        """Stop whatever processes the judge holds."""
        ...
