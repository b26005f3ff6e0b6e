"""Short versions of the long commands `soak` and `busy`."""

import pytest
from gppo_verifiers.code.selftest import SANDBOXES

from tests.judge import busy, soak


@pytest.mark.parametrize(("name", "runs"), [("zygote", 120), ("bwrap", 60), ("crun", 60), ("docker", 60)])
def test_nothing_is_left_after_many_runs_of_which_a_third_are_hostile(engine_of, name, runs):
    engine_of(name)
    before = soak.held()
    sandbox = SANDBOXES[name]()
    wrong = soak.soak(sandbox, runs)
    sandbox.close()
    assert wrong == []
    assert soak.held() == before


def test_a_right_program_passes_on_a_busy_machine(grader):
    with busy.busy(8):
        reports = busy.grade(grader, 5)
    assert [report.score for report in reports] == [1.0] * 5
    assert all(0.7 <= result.cpu_seconds < 1.5 for report in reports for result in report.results)
