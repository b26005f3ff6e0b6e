"""Ordinary programs run as they do anywhere, and every fact about a run is right."""

import os

import pytest
from gppo_verifiers.sandbox.base import PYTHON, End, Limits, Program

from tests.judge.cases import cases, python


@pytest.mark.parametrize("case", cases("benign"), ids=lambda case: case.name)
def test_an_ordinary_program_runs(cell, case):
    expected = case.expected
    facts = cell.run(python(case.source, expected.get("stdin", "").encode()))
    assert facts.end is End.FINISHED, facts
    assert (facts.exit_code, facts.signal) == (expected.get("exit_code"), expected.get("signal")), facts
    assert facts.stdout.decode() == expected["stdout"], facts
    if "stderr" in expected:
        assert facts.stderr.decode() == expected["stderr"]


def test_cpu_time_is_that_of_the_kernel_and_wall_time_goes_on_while_a_program_sleeps(cell):
    facts = cell.run(
        python(
            "import time\nt = time.process_time()\nwhile time.process_time() < t + 0.4: pass\ntime.sleep(0.5)\n",
            limits=Limits(cpu_seconds=2.0, wall_seconds=60.0),
        )
    )
    assert 0.4 <= facts.cpu_seconds < 0.8
    assert facts.wall_seconds >= 0.9  # both parts lie between the start and the end of the run


def test_the_peak_of_memory_is_measured(cell):
    facts = cell.run(python("data = b'x' * (100 << 20)"))
    assert 100 << 20 <= facts.memory_peak_bytes < 130 << 20
    assert not facts.out_of_memory
    assert cell.run(python("pass")).memory_peak_bytes < 20 << 20  # not the largest so far, but this run's own


@pytest.mark.parametrize(("size", "end"), [(1000, End.FINISHED), (1001, End.OUTPUT_LIMIT)])
def test_output_up_to_the_limit_is_kept_and_a_byte_more_is_too_much(cell, size, end):
    for stream in ("stdout", "stderr"):
        facts = cell.run(python(f"import sys\nsys.{stream}.write('x' * {size})", limits=Limits(output_bytes=1000)))
        assert facts.end is end
        assert getattr(facts, stream) == b"x" * 1000


def test_any_command_runs_and_one_that_is_not_there_is_the_programs_failure(cell):
    facts = cell.run(Program(("/bin/sh", "-c", "cat word; echo; pwd; exit 5"), {"word": b"hello"}))
    assert (facts.stdout, facts.exit_code) == (b"hello\n/tmp\n", 5)
    facts = cell.run(Program((PYTHON, "-c", "print(input())"), stdin=b"abc"))
    assert facts.stdout == b"abc\n"
    facts = cell.run(Program(("/nowhere",)))
    assert facts.end is End.FINISHED
    assert facts.exit_code == 127


def test_two_cells_talk_through_pipes_and_see_each_others_end(sandbox, cell):
    reader, writer = os.pipe()
    other = sandbox.open_cell()
    try:
        first = cell.run(Program((PYTHON, "a.py"), {"a.py": b"print('one')\nprint('two')"}, stdout=writer))
        second = other.run(Program((PYTHON, "b.py"), {"b.py": b"import sys\nprint(sys.stdin.read())"}, stdin=reader))
    finally:
        other.close()
    assert first.stdout == b""
    assert second.stdout == b"one\ntwo\n\n"
    for descriptor in (reader, writer):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)  # the sandbox took them over


def test_a_closed_cell_opens_again(sandbox):
    cell = sandbox.open_cell()
    cell.close()
    cell.close()
    assert cell.run(python("print(1)")).stdout == b"1\n"
    cell.close()
