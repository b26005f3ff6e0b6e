"""The mutation gate itself, on a tree of one module and one test: it must not pass what it should not."""

import shutil
import subprocess
from pathlib import Path

import pytest

import tests.mutants
from tests.mutants.fault import Fault, StaleFaultError
from tests.mutants.run import FAST, Colour, examine, examine_unmutated, run_tests, take_snapshot

MODULE, TEST = "gppo_megatron/number.py", "tests/unit/test_number.py"
CODE = "def double(x: int) -> int:\n    return 2 * x\n"
CHECK = "from gppo_megatron.number import double\n\n\ndef test_double() -> None:\n    assert double(3) == 6\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Where the fast tests are one test of `double`."""
    tree = tmp_path / "tree"
    for folder in ("gppo_megatron", "tests", *FAST):
        (tree / folder).mkdir(parents=True)
        (tree / folder / "__init__.py").touch()
    (tree / MODULE).write_text(CODE)
    (tree / TEST).write_text(CHECK)
    shutil.copytree(Path(tests.mutants.__file__).parent, tree / "tests/mutants")
    return tree


def fault(old: str, new: str, caught_by: str = TEST) -> Fault:
    return Fault("fault", MODULE, old, new, caught_by)


def test_a_green_tree_and_a_red_one(tree: Path, tmp_path: Path) -> None:
    assert examine_unmutated(tree, tmp_path / "scratch").passed
    fault("2 *", "3 *").apply(tree)
    finding = examine_unmutated(tree, tmp_path / "scratch")
    assert (finding.passed, finding.text) == (False, f"the fast tests are red {TEST}::test_double")


def test_a_noticed_fault_leaves_the_tree_as_it_was(tree: Path, tmp_path: Path) -> None:
    finding = examine(fault("2 *", "3 *"), tree, tmp_path / "scratch")
    assert (finding.passed, finding.text) == (True, f"caught by {TEST}::test_double")
    assert (tree / MODULE).read_text() == CODE


def test_a_fault_may_be_noticed_elsewhere(tree: Path, tmp_path: Path) -> None:
    other = "tests/unit/test_other.py"
    (tree / other).write_text("def test_nothing() -> None:\n    pass\n")
    finding = examine(fault("2 *", "3 *", other), tree, tmp_path / "scratch")
    assert (finding.passed, finding.text) == (True, f"caught by {TEST}::test_double, not by {other}")


def test_a_survivor_fails_the_gate(tree: Path, tmp_path: Path) -> None:
    finding = examine(fault("2 * x", "x + 3"), tree, tmp_path / "scratch")
    assert (finding.passed, finding.text) == (False, "SURVIVED all fast tests")


@pytest.mark.parametrize("new", ["return 2 ** * x", "return 2 * y"])
def test_code_that_does_not_run_is_no_noticed_fault(tree: Path, tmp_path: Path, new: str) -> None:
    finding = examine(fault("return 2 * x", new), tree, tmp_path / "scratch")
    assert not finding.passed
    assert finding.text.startswith("broken: an error outside of any test")


@pytest.mark.parametrize(("old", "found"), [("4 *", 0), ("x", 2)])
def test_a_text_that_is_not_there_once_is_stale(tree: Path, tmp_path: Path, old: str, found: int) -> None:
    with pytest.raises(StaleFaultError, match=f"its text is found {found} times in {MODULE}"):
        fault(old, "y").apply(tree)
    finding = examine(fault(old, "y"), tree, tmp_path / "scratch")
    assert (finding.passed, finding.text.startswith("not applied: ")) == (False, True)


def test_code_from_outside_the_copy_is_noticed(tree: Path, tmp_path: Path) -> None:
    shutil.rmtree(tree / "gppo_megatron")
    (tree / TEST).write_text("import gppo_megatron\n\n\ndef test_nothing() -> None:\n    assert gppo_megatron\n")
    outcome = run_tests(tree, tmp_path, [TEST], 60)
    assert outcome.colour is Colour.NEITHER
    assert outcome.detail.startswith("imported from outside the copy: ")


def test_a_hang_is_no_failure_of_a_test(tree: Path, tmp_path: Path) -> None:
    (tree / TEST).write_text("import time\n\n\ndef test_sleep() -> None:\n    time.sleep(600)\n")
    outcome = run_tests(tree, tmp_path, [TEST], 1)
    assert (outcome.colour, outcome.detail) == (Colour.NEITHER, f"{TEST} did not end within 1 s")


def test_a_snapshot_has_what_is_not_ignored(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "--quiet", root], check=True)
    for name in ("kept", "deleted", "new", "ignored"):
        (root / name).write_text(name)
    (root / ".gitignore").write_text("ignored\n")
    subprocess.run(["git", "-C", root, "add", "kept", "deleted"], check=True)
    (root / "deleted").unlink()
    (root / "kept").write_text("as it is now")
    take_snapshot(root, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [".gitignore", "kept", "new"]
    assert (tmp_path / "copy" / "kept").read_text() == "as it is now"
