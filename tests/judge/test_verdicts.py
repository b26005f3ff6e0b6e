"""Jobs to reports: every status, every kind of test, and every reward hack refused."""

import pytest
from gppo_verifiers.code.jobs import job_of
from gppo_verifiers.code.types import JobState, TestStatus
from gppo_verifiers.sandbox.base import Limits

from tests.judge.cases import cases

JOBS = cases("jobs")
LIMITS = Limits(memory_bytes=256 << 20)


@pytest.mark.parametrize("case", JOBS, ids=lambda case: case.name)
def test_a_program_gets_its_verdict(grader, case):
    expected = case.expected
    payload = {
        "tests": expected["tests"],
        "language": expected.get("language", "python"),
        "answer": "whole",
        **expected.get("payload", {}),
    }
    report = grader.grade(job_of(payload, case.source, LIMITS))
    assert report.state.value == expected.get("state", "graded"), report
    assert report.score == expected.get("score"), report
    if report.state is JobState.GRADED:
        statuses = [result.status.value for result in report.results]
        assert len(statuses) == len(expected["statuses"]), report
        for status, allowed in zip(statuses, expected["statuses"], strict=True):
            assert status in allowed.split("|"), report


def test_the_cases_meet_every_status_but_the_judges_own_failure():
    met = {status for case in JOBS for status in case.expected.get("statuses", ()) if "|" not in status}
    assert met == {status.value for status in TestStatus} - {TestStatus.INFRA.value}
