"""The sandbox's types refuse what no run can be, and standard input cannot be changed."""

import os

import pytest
from gppo_verifiers.code.types import JobState, Report
from gppo_verifiers.sandbox.base import End, Facts, Limits, Program
from gppo_verifiers.sandbox.sealed import sealed_file


def test_limits_are_positive_and_the_wall_leaves_room_for_the_cpu():
    with pytest.raises(ValueError, match="processes must be > 0, got 0"):
        Limits(processes=0)
    with pytest.raises(ValueError, match="at least twice cpu_seconds = 10"):
        Limits(cpu_seconds=10.0, wall_seconds=16.0)


def test_a_program_has_an_absolute_path_and_plain_file_names():
    with pytest.raises(ValueError, match="absolute path"):
        Program(("python3", "x.py"))
    for name in ("../x", "/etc/x", "", ".", ".."):
        with pytest.raises(ValueError, match="plain name"):
            Program(("/bin/true",), {name: b""})


def test_facts_are_a_fault_or_an_end():
    with pytest.raises(ValueError, match="fault"):
        Facts(End.FAULT)
    with pytest.raises(ValueError, match="exit code or by a signal"):
        Facts(End.FINISHED)
    with pytest.raises(ValueError, match="exit code or by a signal"):
        Facts(End.FINISHED, exit_code=0, signal=9)


def test_a_report_has_a_score_exactly_where_it_is_graded():
    with pytest.raises(ValueError, match="cannot have the score 0"):
        Report(JobState.INFRA_ERROR, 0.0)
    with pytest.raises(ValueError, match="cannot have the score None"):
        Report(JobState.GRADED, None)
    for score in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"in \[0, 1\]"):
            Report(JobState.GRADED, score)


def test_sealed_input_reads_from_its_start_and_cannot_be_written():
    content = bytes(range(256)) * 5000
    descriptor = sealed_file(content)
    try:
        assert os.read(descriptor, len(content) + 1) == content
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.write(again, b"x")
            with pytest.raises(PermissionError):
                os.truncate(again, 0)
        finally:
            os.close(again)
    finally:
        os.close(descriptor)
