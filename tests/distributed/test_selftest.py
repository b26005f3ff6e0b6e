"""`gppo selftest` as a user runs it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.distributed


def selftest(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gppo_megatron", "selftest", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_two_processes_agree_with_one_in_every_layout() -> None:
    done = selftest("--nproc", "2")
    assert done.returncode == 0, done.stderr
    headline, *lines, last = done.stdout.splitlines()
    assert headline.split() == ["layout", "loss", "norm", "weights", "bits"]
    assert len(lines) == 3 * 14
    begun, resumed, moved = (lines[place::3] for place in range(3))
    assert all(line.endswith("  same") for line in begun)
    assert {line.split(maxsplit=1)[1].strip() for line in resumed} == {"0.0e+00  0.0e+00  0.0e+00  same"}
    assert moved[0].startswith("  resumed from one process ")
    assert all(line.startswith("  resumed from the layout before ") for line in moved[1:11])
    assert sum(line.startswith("experts: ") for line in begun) == 3
    assert last == "all equal to one process within 2e-05, 2 processes"
    assert "Traceback" not in done.stderr


def test_a_difference_is_an_exit_status() -> None:
    done = selftest("--nproc", "2", "--tolerance", "1e-12")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
