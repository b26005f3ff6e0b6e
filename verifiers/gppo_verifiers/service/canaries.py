"""Programs whose verdict is known, judged again and again: a node that gets one wrong takes itself out."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gppo_verifiers.service.desk import Desk
from gppo_verifiers.types import Answer, Judge, Task

SUM: Mapping[str, Any] = {"tests": [{"kind": "stdin", "stdin": "19 23\n", "expected": "42\n"}], "answer": "whole"}
CALL: Mapping[str, Any] = {
    "tests": [{"kind": "call", "function": "double", "arguments": [21], "expected": 42}],
    "answer": "whole",
}
SOONER = 4
"""While a node is out, it is tried so many times as often."""


@dataclass(frozen=True)
class Canary:
    """A program, and what its verdict must begin with."""

    name: str
    payload: Mapping[str, Any]
    program: str
    score: float
    detail: str


CANARIES = (
    Canary("a right program", SUM, "print(sum(map(int, input().split())))", 1.0, "AC"),
    Canary("a right function", CALL, "def double(x):\n    return 2 * x", 1.0, "AC"),
    Canary("a wrong program", SUM, "print(41)", 0.0, "WA"),
    Canary("leaving with exit code 0", CALL, "import os\nos._exit(0)", 0.0, "RE"),
    Canary("an endless program", {**SUM, "cpu_seconds": 0.2}, "while True: pass", 0.0, "TLE"),
)


def faults(judge: Judge, canaries: Sequence[Canary] = CANARIES) -> list[str]:
    """One line for every verdict that is not as it must be."""
    verdicts = judge.judge([Answer(Task("code", canary.payload), canary.program) for canary in canaries])
    return [
        f"{canary.name} was judged {verdict.status.value} {verdict.score} {verdict.detail[:100]}"
        for canary, verdict in zip(canaries, verdicts, strict=True)
        if verdict.score != canary.score or not verdict.detail.startswith(canary.detail)
    ]


async def watch(desk: Desk, judge: Judge, seconds: float) -> None:
    """Judge the canaries every so many seconds, until cancelled."""
    while True:
        await asyncio.sleep(seconds / SOONER if desk.refusal else seconds)
        found = await asyncio.to_thread(faults, judge)
        if found:
            desk.take_out(f"the node misjudges: {'; '.join(found)}")
        else:
            desk.put_back()
