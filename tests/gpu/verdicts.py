"""Checks, each in a process of its own so that a crash costs only its own line, and the table of what they found."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NO_GPU = 77
"""Exit status where there is no GPU: nothing was verified, and nothing failed."""
FAILED, SKIPPED = 1, 3
SECONDS = 900


class Skipped(Exception):  # noqa: N818 - it is no error
    """This machine cannot take the check; the text says why."""


Check = Callable[[], str]
"""What was measured, in words. Raises AssertionError where that is wrong, Skipped where nothing could be measured."""


@dataclass(frozen=True)
class Verdict:
    """outcome: PASS, FAIL or SKIP. said: what was measured, or why not."""

    check: str
    outcome: str
    said: str

    def __str__(self) -> str:
        return f"{self.outcome}  {self.check:<34}{self.said}"


def one(name: str, check: Check) -> int:
    """Take one check in this process: prints what it says, returns the exit status."""
    try:
        print(check(), flush=True)
    except Skipped as reason:
        print(reason, flush=True)
        return SKIPPED
    except AssertionError as error:
        print(f"{name}: {error}", flush=True)
        return FAILED
    return 0


def in_a_process(name: str) -> Verdict:
    """Take the check `name` of `tests.gpu` in a new process; the last line it prints is what it says."""
    command = [sys.executable, "-u", "-W", "ignore", "-m", "tests.gpu", name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Verdict(name, "FAIL", f"no answer within {SECONDS} s")
    lines = [line for line in (ended.stdout if ended.stdout.strip() else ended.stderr).splitlines() if line.strip()]
    said = lines[-1] if lines else f"ended with status {ended.returncode} and said nothing"
    if ended.returncode not in (0, SKIPPED):
        crash = [line for line in ended.stderr.splitlines() if line.strip()]
        said = said if ended.returncode == FAILED and ended.stdout.strip() else (crash[-1] if crash else said)
    return Verdict(name, {0: "PASS", SKIPPED: "SKIP"}.get(ended.returncode, "FAIL"), said)


def table(machine: str, names: Iterable[str], take: Callable[[str], Verdict]) -> int:
    """Take all checks and print a line each, as they end; returns the exit status: 1 where one failed."""
    print(machine, flush=True)
    verdicts = []
    for name in names:
        verdicts.append(take(name))
        print(verdicts[-1], flush=True)
    counts = {outcome: sum(each.outcome == outcome for each in verdicts) for outcome in ("PASS", "FAIL", "SKIP")}
    print(f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} could not be taken here", flush=True)
    return FAILED if counts["FAIL"] else 0
