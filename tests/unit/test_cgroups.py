"""Control groups on a fake tree: folders of plain files, which appear and go with their folder as the kernel's do."""

import os
from pathlib import Path

import pytest
from gppo_verifiers.sandbox.base import IsolationError, Limits
from gppo_verifiers.sandbox.cgroups import PREFIX, open_hierarchy

PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
LIMITS = Limits(memory_bytes=256 << 20, processes=32)
VERSION_TWO = {
    "cgroup.subtree_control": "",
    "cgroup.procs": "",
    "cgroup.kill": "",
    "cpu.pressure": PRESSURE.format(0),
    "cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0\n",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n",
    "memory.max": "max\n",
    "memory.peak": "0\n",
    "memory.swap.max": "max\n",
    "pids.events": "max 0\n",
    "pids.max": "max\n",
}
VERSION_ONE = {
    "memory": {
        "cgroup.procs": "",
        "memory.limit_in_bytes": "9223372036854771712\n",
        "memory.memsw.limit_in_bytes": "9223372036854771712\n",
        "memory.max_usage_in_bytes": "0\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    },
    "pids": {"cgroup.procs": "", "pids.max": "max\n", "pids.events": "max 0\n"},
    "cpuacct": {"cgroup.procs": "", "cpuacct.usage": "0\n"},
    "unified": {"cgroup.procs": "", "cgroup.kill": "", "cpu.pressure": PRESSURE.format(0)},
}


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Makes folders under tmp_path behave: new ones hold their files, and only sub-folders keep one from removal."""
    mkdir, rmdir = Path.mkdir, Path.rmdir

    def make(path, *arguments, **options):
        mkdir(path, *arguments, **options)
        tree = path.relative_to(tmp_path).parts[0]
        for name, content in VERSION_ONE.get(tree, VERSION_TWO).items():
            (path / name).write_text(content)

    def remove(path):
        if not any(entry.is_dir() for entry in path.iterdir()):
            for entry in path.iterdir():
                entry.unlink()
        rmdir(path)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    return tmp_path


@pytest.fixture
def version_two(kernel):
    (kernel / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids rdma\n")
    (kernel / "cgroup.subtree_control").write_text("memory pids\n")
    return kernel


@pytest.fixture
def hybrid(kernel):
    for tree in VERSION_ONE:
        (kernel / tree).mkdir()
    return kernel


def only(folder):
    [entry] = [entry for entry in folder.iterdir() if entry.is_dir()]
    return entry


def test_version_two_sets_limits_and_reads_what_a_run_used(version_two):
    hierarchy = open_hierarchy(version_two)
    # The root had memory and pids already; the judge's own folder had nothing.
    assert (version_two / "cgroup.subtree_control").read_text() == "+cpu"
    judge = only(version_two)
    assert (judge / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    group = hierarchy.create(LIMITS)
    run = only(judge)
    assert (run / "memory.max").read_text() == str(256 << 20)
    assert (run / "memory.swap.max").read_text() == "0"
    assert (run / "pids.max").read_text() == "32"
    [procs] = group.procs
    assert os.readlink(f"/proc/self/fd/{procs}") == str(run / "cgroup.procs")
    assert (group.cpu_seconds(), group.waited_seconds(), group.out_of_memory(), group.processes_refused()) == (
        0.0,
        0.0,
        False,
        0,
    )
    (run / "cpu.stat").write_text("usage_usec 1250000\nuser_usec 1000000\nsystem_usec 250000\n")
    (run / "cpu.pressure").write_text(PRESSURE.format(2_500_000))
    (run / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\n")
    (run / "memory.peak").write_text("123456\n")
    (run / "pids.events").write_text("max 7\n")
    assert group.cpu_seconds() == pytest.approx(1.25)
    assert group.waited_seconds() == pytest.approx(2.5)
    assert group.memory_peak_bytes() == 123456
    assert group.out_of_memory()
    assert group.processes_refused() == 7
    group.kill()
    assert (run / "cgroup.kill").read_text() == "1"
    group.remove()
    group.remove()
    assert not run.exists()
    hierarchy.close()
    hierarchy.close()
    assert not judge.exists()


def test_version_two_without_a_memory_peak_says_so(version_two, monkeypatch):
    monkeypatch.delitem(VERSION_TWO, "memory.peak")
    assert open_hierarchy(version_two).create(LIMITS).memory_peak_bytes() is None


@pytest.mark.parametrize("missing", ["cpu", "memory", "pids"])
def test_version_two_without_a_controller_does_not_start(version_two, missing):
    left = [name for name in ("cpu", "memory", "pids") if name != missing]
    (version_two / "cgroup.controllers").write_text(" ".join(left))
    with pytest.raises(IsolationError, match=missing):
        open_hierarchy(version_two)


def test_a_limit_that_does_not_hold_is_an_error_and_leaves_nothing(version_two, monkeypatch):
    hierarchy = open_hierarchy(version_two)
    write = Path.write_text

    def rounding(path, text, *arguments, **options):
        return write(path, "max\n" if path.name == "memory.max" and text.isdecimal() else text, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", rounding)
    with pytest.raises(OSError, match="the limit is max after 268435456 was written"):
        hierarchy.create(LIMITS)
    assert not [entry for entry in only(version_two).iterdir() if entry.is_dir()]


def test_hybrid_sets_limits_in_every_tree_and_reads_what_a_run_used(hybrid):
    hierarchy = open_hierarchy(hybrid)
    group = hierarchy.create(LIMITS)
    runs = {tree: only(only(hybrid / tree)) for tree in VERSION_ONE}
    assert (runs["memory"] / "memory.limit_in_bytes").read_text() == str(256 << 20)
    assert (runs["memory"] / "memory.memsw.limit_in_bytes").read_text() == str(256 << 20)
    assert (runs["pids"] / "pids.max").read_text() == "32"
    assert len(group.procs) == 4
    (runs["cpuacct"] / "cpuacct.usage").write_text("1250000000\n")
    (runs["unified"] / "cpu.pressure").write_text(PRESSURE.format(300_000))
    (runs["memory"] / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (runs["memory"] / "memory.max_usage_in_bytes").write_text("4096\n")
    (runs["pids"] / "pids.events").write_text("max 5\n")
    assert group.cpu_seconds() == pytest.approx(1.25)
    assert group.waited_seconds() == pytest.approx(0.3)
    assert group.out_of_memory()
    assert group.memory_peak_bytes() == 4096
    assert group.processes_refused() == 5
    group.kill()
    assert (runs["unified"] / "cgroup.kill").read_text() == "1"
    group.remove()
    hierarchy.close()
    assert not any(entry.is_dir() for tree in VERSION_ONE for entry in (hybrid / tree).iterdir())


def test_version_one_alone_reads_the_machines_pressure(kernel, tmp_path):
    for tree in ("memory", "pids", "cpuacct"):
        (kernel / tree).mkdir()
    pressure = tmp_path / "pressure"
    with pytest.raises(IsolationError, match="psi=1"):
        open_hierarchy(kernel, pressure)
    pressure.write_text(PRESSURE.format(5_000_000))
    group = open_hierarchy(kernel, pressure).create(LIMITS)
    pressure.write_text(PRESSURE.format(5_500_000))
    assert group.waited_seconds() == pytest.approx(0.5)
    assert len(group.procs) == 3


def test_version_one_without_a_tree_does_not_start(hybrid):
    (hybrid / "pids" / "cgroup.procs").unlink()
    with pytest.raises(IsolationError, match="pids"):
        open_hierarchy(hybrid)


def test_an_unwritable_tree_does_not_start(version_two, monkeypatch):
    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(IsolationError, match="needs root"):
        open_hierarchy(version_two)


def test_what_a_killed_judge_left_is_removed_and_a_living_ones_is_not(hybrid):
    living = open_hierarchy(hybrid)
    living_folder = only(hybrid / "memory")
    for tree in VERSION_ONE:
        (hybrid / tree / f"{PREFIX}1-dead").mkdir()
        (hybrid / tree / f"{PREFIX}1-dead" / "0").mkdir()
    open_hierarchy(hybrid)
    left = {entry.name for entry in (hybrid / "memory").iterdir() if entry.is_dir()}
    assert living_folder.name in left
    assert f"{PREFIX}1-dead" not in left
    assert not (hybrid / "pids" / f"{PREFIX}1-dead").exists()
    living.close()
    assert not living_folder.exists()
