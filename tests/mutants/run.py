"""Copies of the tree, a fault in each, and what the tests make of it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.mutants.fault import Fault, StaleFaultError

FAST = ("tests/unit", "tests/contract", "tests/numeric")
FILE_SECONDS, ALL_SECONDS = 150, 600


class Colour(Enum):
    """green: all passed. red: a test failed. neither: anything else, such as an error outside of a test or no end."""

    GREEN = "green"
    RED = "red"
    NEITHER = "neither"


@dataclass(frozen=True)
class Outcome:
    """One run of pytest. detail: the test that failed, or what went wrong."""

    colour: Colour
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """Whether the gate holds for one fault, or for the unmutated copy, and a line that says why."""

    passed: bool
    text: str


def take_snapshot(root: Path, target: Path) -> None:
    """Copy the tracked and the untracked files of a checkout, as they are now; ignored ones stay behind."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (root / name).is_file():  # a file that was deleted is tracked until the deletion is committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target / name)


def run_tests(tree: Path, scratch: Path, tests: Sequence[str], seconds: float) -> Outcome:
    """Run `tests` in `tree` until one fails, with every import of ours from `tree` (the run itself confirms that).

    scratch: an empty folder for all that the run writes.
    """
    witness, output = scratch / "witness.json", scratch / "output.txt"
    witness.unlink(missing_ok=True)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "tests.mutants.witness"]
    files = [f"--rootdir={tree}", f"--witness={witness}", f"--basetemp={scratch / 'tests'}"]
    command = [sys.executable, "-m", "pytest", *options, *files, *tests]
    # Before site-packages, where an editable install names the checkout.
    path = os.pathsep.join(map(str, (tree, tree / "verifiers")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with output.open("w", encoding="utf-8") as stream:
        try:
            finished = subprocess.run(
                command, cwd=tree, env=environment, timeout=seconds,
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(Colour.NEITHER, f"{' '.join(tests)} did not end within {seconds:g} s")
    return _outcome(finished.returncode, witness, output)


def _outcome(code: int, witness: Path, output: Path) -> Outcome:
    last = " | ".join(output.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
    if not witness.exists():
        return Outcome(Colour.NEITHER, f"pytest did not run (exit code {code}): {last}")
    seen = json.loads(witness.read_text())
    if seen["strangers"]:
        return Outcome(Colour.NEITHER, f"imported from outside the copy: {', '.join(seen['strangers'])}")
    if code == 0:
        return Outcome(Colour.GREEN)
    if code == 1 and seen["failed"]:
        return Outcome(Colour.RED, seen["failed"][0])
    return Outcome(Colour.NEITHER, f"an error outside of any test (exit code {code}): {last}")


def examine_unmutated(snapshot: Path, scratch: Path) -> Finding:
    """The fast tests must pass on the tree as it is, or their failing shows nothing."""
    outcome = _in_a_copy(snapshot, scratch, None, FAST, ALL_SECONDS)
    return Finding(
        outcome.colour is Colour.GREEN, f"the fast tests are {outcome.colour.value} {outcome.detail}".rstrip()
    )


def examine(fault: Fault, snapshot: Path, scratch: Path) -> Finding:
    """Seed `fault` into a copy: its own test must fail, or else one of the fast tests."""
    try:
        outcome = _in_a_copy(snapshot, scratch, fault, (fault.caught_by,), FILE_SECONDS)
        if outcome.colour is Colour.GREEN:
            outcome = _in_a_copy(snapshot, scratch, fault, FAST, ALL_SECONDS)
    except StaleFaultError as error:
        return Finding(False, f"not applied: {error}")
    match outcome.colour:
        case Colour.RED:
            elsewhere = "" if outcome.detail.startswith(fault.caught_by) else f", not by {fault.caught_by}"
            return Finding(True, f"caught by {outcome.detail}{elsewhere}")
        case Colour.GREEN:
            return Finding(False, "SURVIVED all fast tests")
        case Colour.NEITHER:
            return Finding(False, f"broken: {outcome.detail}")


def _in_a_copy(snapshot: Path, scratch: Path, fault: Fault | None, tests: Sequence[str], seconds: float) -> Outcome:
    shutil.rmtree(scratch, ignore_errors=True)
    tree = scratch / "tree"
    shutil.copytree(snapshot, tree)
    if fault is not None:
        fault.apply(tree)
    return run_tests(tree, scratch, tests, seconds)
