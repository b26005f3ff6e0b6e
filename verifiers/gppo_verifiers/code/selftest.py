"""Tries a sandbox before it is used: short attacks must be held, and ordinary programs must run.

`python -m gppo_verifiers.code.selftest` prints the table and ends with status 1 where a row failed.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from gppo_verifiers.code.grader import Grader
from gppo_verifiers.code.languages import LANGUAGES
from gppo_verifiers.code.turns import Turns
from gppo_verifiers.code.types import CallTest, Job, StdinTest
from gppo_verifiers.sandbox.base import ENVIRONMENT, PYTHON, Cell, End, Facts, IsolationError, Limits, Program, Sandbox
from gppo_verifiers.sandbox.bwrap import BwrapSandbox
from gppo_verifiers.sandbox.docker import DockerSandbox
from gppo_verifiers.sandbox.oci import OciSandbox
from gppo_verifiers.sandbox.zygote import ZygoteSandbox

SANDBOXES: Mapping[str, Callable[[], Sandbox]] = {
    "zygote": ZygoteSandbox,
    "bwrap": BwrapSandbox,
    "crun": partial(OciSandbox, "crun"),
    "runc": partial(OciSandbox, "runc"),
    "docker": DockerSandbox,
}
LIMITS = Limits(cpu_seconds=0.5, wall_seconds=60.0, memory_bytes=128 << 20, processes=32)
HELD = b"ran\nheld\n"

# Each prints `ran` at once, so that a sandbox in which nothing runs does not hold everything.
TRY = "import ctypes, os, socket\nprint('ran', flush=True)\nheld = True\n"
TELL = "print('held' if held else 'ESCAPED')\n"
ATTEMPTS = {
    "reads the host's files": (
        "held = not any(map(os.path.exists, ('/root', '/home', '/etc/shadow', '/sys', '/var')))\n"
    ),
    "looks into other processes": (
        "for process in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if process != str(os.getpid()):\n"
        "        try:\n            open(f'/proc/{process}/environ', 'rb').read()\n            held = False\n"
        "        except OSError:\n            pass\n"
    ),
    "sees the judge's environment": "held = not set(os.environ) & set(input().split())\n",
    "opens a network socket": (
        "try:\n    socket.socket(socket.AF_INET)\n    held = False\nexcept OSError:\n    pass\n"
    ),
    "writes to the system": (
        "for path in ('/x', '/usr/x', '/etc/x', '/dev/x', '/proc/sys/kernel/core_pattern'):\n"
        "    try:\n        os.open(path, os.O_CREAT | os.O_WRONLY)\n        held = False\n"
        "    except OSError:\n        pass\n"
    ),
    "changes its input": (
        "try:\n    os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'x')\n    held = False\nexcept OSError:\n    pass\n"
    ),
    "makes a user namespace": "held = ctypes.CDLL(None).unshare(0x10000000) != 0\n",
    "makes dangerous system calls": (
        "for number in (101, 165, 250, 298, 310, 321, 323, 425):\n"
        "    held = held and ctypes.CDLL(None).syscall(number, 0, 0, 0, 0, 0) == -1\n"
    ),
    "keeps a right of root's": (
        "with open('/proc/self/status') as file:\n"
        "    status = dict(line.split(':', 1) for line in file)\n"
        "held = not any(int(status['Cap' + name], 16) for name in ('Inh', 'Prm', 'Eff', 'Bnd', 'Amb'))\n"
        "held = held and int(status['NoNewPrivs']) == 1 and int(status['Seccomp']) == 2 and os.getuid() != 0\n"
    ),
    "has an open descriptor more": "held = not [n for n in range(3, 999) if os.path.exists(f'/proc/self/fd/{n}')]\n",
    "leaves a file": "held = not os.path.exists('/tmp/left')\nopen('/tmp/left', 'w').close()\n",
    "finds that file": "held = not os.path.exists('/tmp/left')\n",
}
OVERUSES: Mapping[str, tuple[str, Callable[[Facts], bool]]] = {
    "loops for ever": ("while True: pass\n", lambda facts: facts.end is End.CPU_LIMIT),
    "starts processes for ever": (
        "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
        lambda facts: facts.end is End.CPU_LIMIT and facts.processes_refused > 0,
    ),
    "takes too much memory": ("held = b'x' * (1 << 30)\n", lambda facts: facts.out_of_memory),
    "prints for ever": ("while True: os.write(1, b'x' * 65536)\n", lambda facts: facts.end is End.OUTPUT_LIMIT),
}
ORDINARY = (
    "import subprocess, threading\n"
    "thread = threading.Thread(target=print, args=('thread',))\nthread.start()\nthread.join()\n"
    "open('/tmp/file', 'w').write('file')\nprint(open('/tmp/file').read(), flush=True)\n"
    "subprocess.run(['/bin/echo', 'child'])\n"
)


@dataclass(frozen=True)
class Row:
    """One trial. detail: what was seen instead, where it failed."""

    name: str
    passed: bool
    detail: str = ""


def trials(sandbox: Sandbox, languages: Collection[str]) -> list[Row]:
    """Every row, in a cell of its own sandbox. Takes a few seconds. Raises IsolationError where no cell opens."""
    cell = sandbox.open_cell()
    try:
        rows = [_ordinary(cell), *_attacks(cell)]
    finally:
        cell.close()
    grader = Grader(sandbox, Turns())
    try:
        return [*rows, *_verdicts(grader, languages)]
    finally:
        grader.close()


def require(sandbox: Sandbox, languages: Collection[str]) -> None:
    """Raises IsolationError that lists every trial that failed."""
    failed = [row for row in trials(sandbox, languages) if not row.passed]
    if failed:
        lines = "\n".join(f"  {row.name}: {row.detail}" for row in failed)
        raise IsolationError(f"the sandbox {sandbox.name} failed its self-test:\n{lines}")


def table(rows: Collection[Row]) -> str:
    width = max(len(row.name) for row in rows)
    return "\n".join(f"{row.name:{width}}  {'ok' if row.passed else 'FAILED'}  {row.detail}".rstrip() for row in rows)


def _run(cell: Cell, source: str, stdin: bytes = b"") -> Facts:
    return cell.run(Program((PYTHON, "trial.py"), {"trial.py": source.encode()}, stdin, limits=LIMITS))


def _row(name: str, passed: bool, facts: Facts) -> Row:
    seen = facts.fault or f"{facts.end.value}, {facts.stdout[-80:]!r}, {facts.stderr[-200:]!r}"
    return Row(name, passed, "" if passed else seen)


def _ordinary(cell: Cell) -> Row:
    facts = _run(cell, ORDINARY)
    return _row("an ordinary program runs", facts.stdout == b"thread\nfile\nchild\n", facts)


def _attacks(cell: Cell) -> list[Row]:
    ours = " ".join(set(os.environ) - set(ENVIRONMENT)).encode()
    rows = []
    for name, attempt in ATTEMPTS.items():
        facts = _run(cell, TRY + attempt + TELL, ours)
        rows.append(_row(f"held: {name}", facts.stdout == HELD, facts))
    for name, (source, held) in OVERUSES.items():
        facts = _run(cell, TRY + source)
        rows.append(_row(f"ended: {name}", facts.stdout.startswith(b"ran\n") and held(facts), facts))
    return rows


def _verdicts(grader: Grader, languages: Collection[str]) -> list[Row]:
    rows = []
    for name in languages:
        language = LANGUAGES[name]
        for expected, score in (("5", 1.0), ("6", 0.0)):
            report = grader.grade(Job(language.sample, (StdinTest("2 3", expected),), name))
            what = "right" if score else "wrong"
            rows.append(Row(f"{name}: a {what} program is {what}", report.score == score, _unless(score, report.score)))
        if language.functions:
            report = grader.grade(Job("import os\nos._exit(0)\n", (CallTest("f", [1], 1),), name))
            rows.append(
                Row(f"{name}: leaving with exit code 0 is no pass", report.score == 0.0, _unless(0.0, report.score))
            )
    return rows


def _unless(expected: float, score: float | None) -> str:
    return "" if score == expected else f"its score is {score}"


def main() -> int:
    """The command; returns its exit status."""
    parser = ArgumentParser(
        prog="python -m gppo_verifiers.code.selftest", description="Try the sandboxes of this machine."
    )
    parser.add_argument("--sandbox", choices=SANDBOXES, default="zygote")
    parser.add_argument("--languages", nargs="+", choices=LANGUAGES, default=list(LANGUAGES))
    options = parser.parse_args()
    try:
        sandbox = SANDBOXES[options.sandbox]()
        try:
            rows = trials(sandbox, options.languages)
        finally:
            sandbox.close()
    except IsolationError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
