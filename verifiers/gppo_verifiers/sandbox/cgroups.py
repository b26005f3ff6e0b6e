"""One control group a run: the kernel's own count of CPU time, memory and processes, and a kill nothing escapes.

Version 2, version 1, and hybrid, which is version 1 with the empty version 2 hierarchy beside it.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from signal import SIGKILL
from typing import Protocol

from gppo_verifiers.sandbox.base import IsolationError, Limits

ROOT = Path("/sys/fs/cgroup")
PRESSURE = Path("/proc/pressure/cpu")
PREFIX = "gppo-judge-"
REMOVE_SECONDS = 5.0
MICRO, NANO = 1e-6, 1e-9


class Group(Protocol):
    """The control group of one run. Descriptors of `procs` stay open until `remove`."""

    @property
    def procs(self) -> Sequence[int]:
        """Descriptors of cgroup.procs files; a process that writes "0" to each is in the group."""
        ...

    def cpu_seconds(self) -> float:
        """User and system time so far, of dead processes too."""
        ...

    def waited_seconds(self) -> float:
        """How long so far at least one thread was ready but got no core."""
        ...

    def memory_peak_bytes(self) -> int | None: ...

    def out_of_memory(self) -> bool: ...

    def processes_refused(self) -> int: ...

    def kill(self) -> None:
        """Kill every process in it; may be called often."""
        ...

    def remove(self) -> None:
        """Kill what is left and remove the group. Raises OSError when that fails; may be called twice."""
        ...


class Hierarchy(Protocol):
    """Where a judge makes its groups."""

    def create(self, limits: Limits) -> Group:
        """A new group with these limits in force. Raises OSError."""
        ...

    def close(self) -> None:
        """Remove the judge's own folders; its groups must be gone. May be called twice."""
        ...


def open_hierarchy(root: Path = ROOT, pressure: Path = PRESSURE) -> Hierarchy:
    """The hierarchy of this machine, for this judge. Removes what judges left that were killed. Raises IsolationError.

    pressure: the machine's own, read where groups have none.
    """
    try:
        if (root / "cgroup.controllers").exists():
            return VersionTwo(root)
        return VersionOne(root, pressure)
    except OSError as error:
        raise IsolationError(
            f"control groups under {root} cannot be used ({error.strerror}: {error.filename}); the judge needs root, "
            "and in a container a writable control group of its own"
        ) from error


class Folders:
    """One judge's folder in each of several hierarchies. A lock on the first shows that the judge lives."""

    def __init__(self, parents: Sequence[Path]) -> None:
        _remove_abandoned(parents)
        self._lock: int | None = None
        while self._lock is None:
            first = parents[0] / f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
            self._lock = _made_and_locked(first)
        self.paths = [first, *(parent / first.name for parent in parents[1:])]
        for path in self.paths[1:]:
            path.mkdir()

    def close(self) -> None:
        if self._lock is None:
            return
        for path in reversed(self.paths):
            with suppress(FileNotFoundError):
                path.rmdir()
        os.close(self._lock)
        self._lock = None


class VersionTwo:
    """Implements `Hierarchy` where the controllers are version 2's."""

    NEEDED = ("cpu", "memory", "pids")

    def __init__(self, root: Path) -> None:
        missing = set(self.NEEDED) - set((root / "cgroup.controllers").read_text().split())
        if missing:
            raise IsolationError(f"{root} does not offer the controllers {', '.join(sorted(missing))} to this judge")
        self._numbers = count()
        self._folders = Folders([root])
        [self._folder] = self._folders.paths
        for parent in (root, self._folder):
            _enable(parent, self.NEEDED)
        if not (self._folder / "cpu.pressure").exists():
            raise IsolationError(f"{self._folder} has no cpu.pressure; start the kernel with psi=1")

    def create(self, limits: Limits) -> Group:
        path = self._folder / str(next(self._numbers))
        path.mkdir()
        try:
            _limit(path / "memory.max", limits.memory_bytes)
            if (path / "memory.swap.max").exists():
                _limit(path / "memory.swap.max", 0)
            _limit(path / "pids.max", limits.processes)
            return VersionTwoGroup(path)
        except BaseException:
            path.rmdir()
            raise

    def close(self) -> None:
        self._folders.close()


class VersionTwoGroup:
    """Implements `Group`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.procs = _open_procs([path])

    def cpu_seconds(self) -> float:
        return _keyed(self._path / "cpu.stat", "usage_usec") * MICRO

    def waited_seconds(self) -> float:
        return _stalled(self._path / "cpu.pressure")

    def memory_peak_bytes(self) -> int | None:
        peak = self._path / "memory.peak"  # since Linux 5.19
        return int(_read(peak)) if peak.exists() else None

    def out_of_memory(self) -> bool:
        return _keyed(self._path / "memory.events", "oom_kill") > 0

    def processes_refused(self) -> int:
        return _keyed(self._path / "pids.events", "max")

    def kill(self) -> None:
        _kill(self._path)

    def remove(self) -> None:
        _remove([self._path], self.procs)
        self.procs = []


class VersionOne:
    """Implements `Hierarchy` where each controller has a tree of its own, perhaps with version 2 beside them."""

    NEEDED = ("memory", "pids", "cpuacct")

    def __init__(self, root: Path, pressure: Path) -> None:
        missing = [name for name in self.NEEDED if not (root / name / "cgroup.procs").exists()]
        if missing:
            raise IsolationError(f"{root} has no control groups for {', '.join(missing)}; mount them there")
        unified = root / "unified"
        self._hybrid = (unified / "cgroup.procs").exists()
        self._pressure = pressure
        self._numbers = count()
        self._folders = Folders([root / name for name in self.NEEDED] + [unified] * self._hybrid)
        if not self._hybrid and not pressure.exists():
            raise IsolationError(f"there is no {pressure}; start the kernel with psi=1")

    def create(self, limits: Limits) -> Group:
        name = str(next(self._numbers))
        paths = [folder / name for folder in self._folders.paths]
        memory, pids, *_ = paths
        made: list[Path] = []
        try:
            for path in paths:
                path.mkdir()
                made.append(path)
            _limit(memory / "memory.limit_in_bytes", limits.memory_bytes)
            if (memory / "memory.memsw.limit_in_bytes").exists():
                _limit(memory / "memory.memsw.limit_in_bytes", limits.memory_bytes)
            elif len(Path("/proc/swaps").read_text().splitlines()) > 1:
                raise IsolationError("memory could be swapped out past its limit; boot with swapaccount=1")
            _limit(pids / "pids.max", limits.processes)
            return VersionOneGroup(paths, self._pressure if not self._hybrid else paths[3] / "cpu.pressure")
        except BaseException:
            for path in made:
                path.rmdir()
            raise

    def close(self) -> None:
        self._folders.close()


class VersionOneGroup:
    """Implements `Group`. paths: memory, pids, cpuacct and, where it is there, version 2."""

    def __init__(self, paths: Sequence[Path], pressure: Path) -> None:
        self._paths = paths
        self._memory, self._pids, self._cpuacct, *_ = paths
        self._pressure = pressure
        self._waited_before = _stalled(pressure)
        self.procs = _open_procs(paths)

    def cpu_seconds(self) -> float:
        return int(_read(self._cpuacct / "cpuacct.usage")) * NANO

    def waited_seconds(self) -> float:
        return _stalled(self._pressure) - self._waited_before

    def memory_peak_bytes(self) -> int | None:
        return int(_read(self._memory / "memory.max_usage_in_bytes"))

    def out_of_memory(self) -> bool:
        return _keyed(self._memory / "memory.oom_control", "oom_kill") > 0

    def processes_refused(self) -> int:
        return _keyed(self._pids / "pids.events", "max")

    def kill(self) -> None:
        _kill(self._paths[-1])

    def remove(self) -> None:
        _remove(self._paths, self.procs)
        self.procs = []


def _read(path: Path) -> str:
    """A small file; several times as fast as Python's own way, and read five times a run."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 16).decode("ascii")
    finally:
        os.close(descriptor)


def _limit(path: Path, value: int) -> None:
    """Set a limit, and see that it holds: some kernels round it, and some drop it without an error."""
    path.write_text(str(value))
    kept = _read(path).strip()
    if not kept.isdecimal() or not value - os.sysconf("SC_PAGE_SIZE") < int(kept) <= value:
        raise OSError(errno.EINVAL, f"the limit is {kept} after {value} was written", str(path))


def _enable(folder: Path, controllers: Sequence[str]) -> None:
    control = folder / "cgroup.subtree_control"
    wanted = [name for name in controllers if name not in control.read_text().split()]
    if wanted:
        control.write_text(" ".join(f"+{name}" for name in wanted))


def _open_procs(paths: Sequence[Path]) -> Sequence[int]:
    descriptors: list[int] = []
    try:
        for path in paths:
            descriptors.append(os.open(path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors


def _keyed(path: Path, key: str) -> int:
    """The number after `key` in a file of `key value` lines. Raises ValueError where it is missing."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    raise ValueError(f"{path} does not tell {key}")


def _stalled(pressure: Path) -> float:
    """Seconds in which some thread waited for a core: the total of the line `some`."""
    return int(_read(pressure).splitlines()[0].rpartition("total=")[2]) * MICRO


def _kill(path: Path) -> None:
    """Everything in one group, at once where the kernel can (since 5.14), else one by one until none is left."""
    try:
        descriptor = os.open(path / "cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        deadline = time.monotonic() + REMOVE_SECONDS
        while (members := (path / "cgroup.procs").read_text().split()) and time.monotonic() < deadline:
            for member in members:
                with suppress(ProcessLookupError):
                    os.kill(int(member), SIGKILL)
        return
    try:
        os.write(descriptor, b"1")
    finally:
        os.close(descriptor)


def _remove(paths: Sequence[Path], procs: Sequence[int]) -> None:
    for descriptor in procs:
        os.close(descriptor)
    for path in reversed(paths):
        deadline = time.monotonic() + REMOVE_SECONDS
        while path.exists():
            try:
                path.rmdir()
            except OSError as error:
                # A killed process stays a member until its parent has taken its exit status.
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                _kill(path)
                time.sleep(0.001)


def _made_and_locked(folder: Path) -> int | None:
    """A new folder's lock; None where another judge that starts took the folder for an abandoned one."""
    folder.mkdir()
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)
    if folder.exists():
        return lock
    os.close(lock)
    return None


def _remove_abandoned(parents: Sequence[Path]) -> None:
    """Groups of judges that were killed: nobody holds their lock. What cannot be removed is left for the next start."""
    for folder in parents[0].glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        # The lock is held until the folder is gone, so that its maker waits and then sees that.
        with suppress(OSError), _closing(lock):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for base in (parent / folder.name for parent in reversed(parents)):
                groups = [path for path in base.glob("*") if path.is_dir()]
                _remove([*([base] if base.exists() else []), *groups], [])


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)
