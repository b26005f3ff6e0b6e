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
    assert headline.split() == ["layout", "loss", "norm", "weights", "sync"]
    assert len(lines) == 11
    assert all(line.endswith("  same") for line in lines)
    assert last == "all equal to one process within 2e-05, 2 processes"
    assert "Traceback" not in done.stderr


def test_a_difference_is_an_exit_status() -> None:
    done = selftest("--nproc", "2", "--tolerance", "1e-12")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
