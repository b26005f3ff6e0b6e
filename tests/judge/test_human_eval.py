"""Real tasks: every canonical solution passes, and of the mutants none.

All of them on the fork server, and every eighth elsewhere; `python -m tests.judge.human_eval --sandbox NAME` runs all.
"""

import pytest
from gppo_verifiers.code.types import JobState

from tests.judge.human_eval import MUTANTS, mutant, tasks


@pytest.fixture(scope="module")
def human_eval(sandbox):
    found = tasks()
    assert len(found) == 164
    return found if sandbox.name == "zygote" else found[::8]


def test_every_canonical_solution_passes(grader, human_eval):
    reports = {task.name: grader.grade(task.job(task.solution)) for task in human_eval}
    assert {name: report for name, report in reports.items() if report.score != 1.0} == {}


@pytest.mark.parametrize("name", MUTANTS)
def test_no_mutant_passes(grader, human_eval, name):
    reports = {task.name: grader.grade(task.job(mutant(task, name))) for task in human_eval}
    assert {name: report for name, report in reports.items() if report.state is not JobState.GRADED} == {}
    assert {name: report for name, report in reports.items() if report.score != 0.0} == {}
