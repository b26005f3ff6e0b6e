"""What every sandbox offers: run one program in isolation, and report facts. A verdict is made elsewhere.

Every back end gives a run the same surroundings. It is alone in process, mount, IPC and network namespaces, as an
unprivileged user without capabilities, under the system-call filter of `seccomp`, with an empty environment but for
`ENVIRONMENT`. The file system is read-only except WORK_DIRECTORY, a fresh memory-backed folder of `disk_bytes` in
which it starts and which holds its files. Standard input is a file that nobody can change, or a pipe.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

PYTHON = "/usr/bin/python3"
WORK_DIRECTORY = "/tmp"
ENVIRONMENT: Mapping[str, str] = {
    "HOME": WORK_DIRECTORY,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONINTMAXSTRDIGITS": "0",
}


class IsolationError(Exception):
    """The machine cannot isolate programs as it must; the message says what is missing and how to get it.

    Raised at start. There is no weaker sandbox to fall back to.
    """


@dataclass(frozen=True)
class Limits:
    """What one run may use. Only the wall time is a matter of how busy the machine is, so it is only a kill.

    cpu_seconds: of all its processes together, dead ones included. memory_bytes: likewise, with the files it writes.
    output_bytes: of standard output, and of standard error. file_bytes: the largest file, and all files together.
    processes: threads count.
    """

    cpu_seconds: float = 4.0
    wall_seconds: float = 16.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    file_bytes: int = 16 << 20
    stack_bytes: int = 64 << 20
    processes: int = 64
    open_files: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"the limit {name} must be > 0, got {value}")
        if self.wall_seconds < 2 * self.cpu_seconds:
            raise ValueError(
                f"wall_seconds = {self.wall_seconds} must be at least twice cpu_seconds = {self.cpu_seconds}: "
                "on a busy machine it would end runs that the CPU limit allows"
            )


@dataclass(frozen=True)
class Program:
    """What to run.

    arguments: the command; its first is an absolute path. (PYTHON, name, ...) runs the file `name` of `files`, and a
        back end may do so in an interpreter that is already there.
    files: put into the work directory before the start, readable and executable; plain names.
    stdin: the bytes to read, or the descriptor of a pipe's reading end. stdout: the descriptor of a pipe's writing end,
        where it is not to be collected. `run` takes descriptors over: it closes them once the program holds them, or
        the run has failed. So programs in two cells that share two pipes talk to each other, and each sees the end of
        the other.
    """

    arguments: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    stdin: bytes | int = b""
    stdout: int | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.arguments or not self.arguments[0].startswith("/"):
            raise ValueError(f"a command starts with an absolute path, got {self.arguments}")
        for name in self.files:
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"a file of a program has a plain name, got {name!r}")


class End(Enum):
    """Why a run is over."""

    FINISHED = "finished"  # by itself: exit or signal
    CPU_LIMIT = "cpu_limit"  # killed: cpu_seconds used up
    WALL_LIMIT = "wall_limit"  # killed: wall_seconds over
    OUTPUT_LIMIT = "output_limit"  # killed: more than output_bytes written
    FAULT = "fault"  # the sandbox failed: nothing else here says anything about the program


@dataclass(frozen=True)
class Facts:
    """What happened in one run. The first process counts for exit_code and signal, exactly one of which is known
    unless the sandbox failed; when it ends, all others are killed.

    stdout, stderr: at most output_bytes each. cpu_seconds: dead descendants included. waited_seconds: how long at
    least one of its threads was ready but got no core. memory_peak_bytes: None where the kernel does not tell.
    out_of_memory: the kernel killed a process of the run for its memory limit. processes_refused: forks that the limit
    stopped. fault: what went wrong with the sandbox.
    """

    end: End
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    waited_seconds: float = 0.0
    memory_peak_bytes: int | None = None
    out_of_memory: bool = False
    processes_refused: int = 0
    fault: str = ""

    def __post_init__(self) -> None:
        if (self.end is End.FAULT) != bool(self.fault):
            raise ValueError("a fault and its description come together")
        if self.end is not End.FAULT and (self.exit_code is None) == (self.signal is None):
            raise ValueError("a run ends with an exit code or by a signal")


class Cell(Protocol):
    """A place where one program runs at a time; nothing of a run is left for the next one. Not thread-safe."""

    def run(self, program: Program) -> Facts:
        """Run to the end. Never raises for what the program does, nor for a failing sandbox: that is End.FAULT, and
        the next run starts in a new cell."""
        ...

    def close(self) -> None:
        """Kill what runs and remove every trace; may be called twice."""
        ...


class Sandbox(Protocol):
    """A back end. Creating one raises IsolationError where this machine lacks what it needs."""

    @property
    def name(self) -> str: ...

    def open_cell(self) -> Cell:
        """A new cell, ready to run. Raises IsolationError. May be called from any thread."""
        ...

    def close(self) -> None:
        """Remove what the sandbox itself made; its cells are closed before. May be called twice."""
        ...
