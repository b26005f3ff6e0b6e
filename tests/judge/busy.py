"""A right program on a machine that is busy: its CPU time decides, and not how long it had to wait.

    python -m tests.judge.busy --runs 100 --busy 8

runs a program of some 0.7 s CPU under a limit of 1.5 s while so many processes keep every core busy.
"""

import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager

from gppo_verifiers.code.grader import Grader
from gppo_verifiers.code.selftest import SANDBOXES
from gppo_verifiers.code.turns import Turns
from gppo_verifiers.code.types import Job, Report, StdinTest
from gppo_verifiers.sandbox.base import PYTHON, Limits

LIMITS = Limits(cpu_seconds=1.5, wall_seconds=60.0)
SOURCE = "import time\nwhile time.process_time() < 0.7:\n    sum(range(1000))\nprint(input())\n"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    others = [subprocess.Popen([PYTHON, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def grade(grader: Grader, runs: int) -> list[Report]:
    job = Job(SOURCE, (StdinTest("1", "1"),), limits=LIMITS)
    return [grader.grade(job) for _ in range(runs)]


def main() -> int:
    parser = ArgumentParser(prog="python -m tests.judge.busy")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--busy", type=int, default=8)
    parser.add_argument("--sandbox", choices=SANDBOXES, default="zygote")
    options = parser.parse_args()
    sandbox = SANDBOXES[options.sandbox]()
    grader = Grader(sandbox, Turns())
    with busy(options.busy):
        began = time.monotonic()
        reports = grade(grader, options.runs)
        seconds = time.monotonic() - began
    grader.close()
    sandbox.close()
    passed = sum(report.score == 1.0 for report in reports)
    most = max(result.cpu_seconds for report in reports for result in report.results)
    print(
        f"{options.busy} busy processes: {passed} of {options.runs} passed; the most CPU of a run was {most:.2f} s, "
        f"{seconds / options.runs:.1f} s of wall a run"
    )
    return 0 if passed == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
