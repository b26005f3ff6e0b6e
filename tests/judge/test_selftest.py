"""The start-up self-test passes on the real sandbox, fails on one that holds nothing or runs nothing."""

import os
import subprocess
import sys

import pytest
from gppo_verifiers.code import selftest
from gppo_verifiers.code.judge import CodeJudge
from gppo_verifiers.code.languages import LANGUAGES
from gppo_verifiers.sandbox.base import PYTHON, End, Facts, IsolationError, Limits

HARMLESS = (
    "reads the host's files",
    "looks into other processes",
    "sees the judge's environment",
    "opens a network socket",
    "makes a user namespace",
    "keeps a right of root's",
)


class Dead:
    """A sandbox in which nothing runs: every attack fails there."""

    name = "dead"

    def open_cell(self):
        return self

    def run(self, program):
        return Facts(End.FINISHED, exit_code=0)

    def close(self):
        pass


@pytest.mark.parametrize("name", selftest.SANDBOXES)
def test_every_trial_passes_and_the_command_prints_them(engine_of, name):
    engine_of(name)
    command = [sys.executable, "-m", "gppo_verifiers.code.selftest", "--sandbox", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(selftest.ATTEMPTS) + len(selftest.OVERUSES) + 3 + 2
    assert all(line.endswith("  ok") for line in lines)


@pytest.mark.parametrize("name", HARMLESS)
def test_an_attempt_succeeds_outside(name):
    source = selftest.TRY + selftest.ATTEMPTS[name] + selftest.TELL
    done = subprocess.run(
        [PYTHON, "-c", source], input=" ".join(os.environ), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ran\nESCAPED\n", done


def test_a_sandbox_in_which_nothing_runs_fails_every_row_that_is_not_about_wrong_programs():
    rows = selftest.trials(Dead(), LANGUAGES)
    passed = {row.name for row in rows if row.passed}
    assert passed == {
        "python: a wrong program is wrong",
        "python: leaving with exit code 0 is no pass",
        "cpp: a wrong program is wrong",
    }


def test_a_judge_does_not_open_on_a_sandbox_that_fails():
    with pytest.raises(
        IsolationError, match="the sandbox dead failed its self-test:\n  an ordinary program runs: finished"
    ):
        CodeJudge(Dead(), 1, Limits(), ["python"])
