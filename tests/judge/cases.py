"""Cases as data: a folder with a program, and `case.json`, which says what must come of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gppo_verifiers.sandbox.base import PYTHON, Limits, Program

ROOT = Path(__file__).parents[1] / "verdicts"
LIMITS = Limits(cpu_seconds=1.0, wall_seconds=60.0, memory_bytes=256 << 20)


@dataclass(frozen=True)
class Case:
    name: str
    source: str
    expected: dict[str, Any]


def cases(kind: str) -> list[Case]:
    found = [
        Case(
            name=folder.name,
            source=next(folder.glob("program.*")).read_text(),
            expected=json.loads((folder / "case.json").read_text()),
        )
        for folder in sorted((ROOT / kind).iterdir())
    ]
    assert found, f"no cases of {kind}"
    return found


def python(source: str, stdin: bytes = b"", limits: Limits = LIMITS) -> Program:
    return Program((PYTHON, "solution.py"), {"solution.py": source.encode()}, stdin, limits=limits)
