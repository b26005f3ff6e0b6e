"""Thousands of runs, a third of them hostile: what is left afterwards, and whether every run ended as it should.

    python -m tests.judge.soak --runs 2000 --sandbox zygote

prints what the process and the machine hold before and after, and ends with status 1 where anything is left.
"""

import os
import sys
import time
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gppo_verifiers.code.selftest import SANDBOXES
from gppo_verifiers.sandbox.base import End, Limits, Sandbox

from tests.judge.cases import python

LIMITS = Limits(cpu_seconds=0.2, wall_seconds=60.0, memory_bytes=64 << 20, processes=24)
BENIGN = (("print(sum(map(int, input().split())))", {End.FINISHED}), ("import os; print(os.getpid())", {End.FINISHED}))
HOSTILE = (
    ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", {End.CPU_LIMIT}),
    ("import os\nif os.fork() == 0:\n os.setsid()\n import time; time.sleep(999)", {End.FINISHED}),
    ("x = b'x' * (1 << 30)", {End.FINISHED}),
    ("import os\nwhile True: os.write(1, b'x' * 65536)", {End.OUTPUT_LIMIT, End.CPU_LIMIT}),
    ("import os\nfor n in range(5000): os.close(os.open(f'/tmp/{n}', os.O_CREAT))", {End.FINISHED, End.CPU_LIMIT}),
    ("open('/tmp/x', 'wb').write(b'x' * (15 << 20))\nimport os\nos.kill(os.getpid(), 9)", {End.FINISHED}),
    ("import os\nos.dup2(0, 900 if False else 9)\nos.closerange(0, 3)", {End.FINISHED}),
)


@dataclass(frozen=True)
class Held:
    """What there is on this machine: of this process, and in all."""

    descriptors: int
    children: int
    mounts: int
    groups: int
    temporary: int


def held() -> Held:
    """Counts; those of the machine may be changed by others at the same time."""
    groups = [path for path in Path("/sys/fs/cgroup").rglob("gppo-judge-*") if f"-{os.getpid()}-" in path.name]
    return Held(
        descriptors=len(os.listdir("/proc/self/fd")),
        children=len(descendants()),
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        groups=sum(1 for group in groups for path in [group, *group.rglob("*")] if path.is_dir()),
        temporary=len(
            [name for place in ("/tmp", "/run") for name in os.listdir(place) if "gppo" in name or "solution" in name]
        ),
    )


def descendants() -> set[int]:
    """All processes below this one, dead ones that nobody took included."""
    parents = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            continue
        parents[int(process)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    front = {os.getpid()}
    while front:
        front = {process for process, parent in parents.items() if parent in front}
        found |= front
    return found


def soak(sandbox: Sandbox, runs: int, workers: int = 2) -> list[str]:
    """Run them all; returns one line for every run that did not end as it should."""

    def part(first: int) -> list[str]:
        wrong = []
        cell = sandbox.open_cell()
        for number in range(first, runs, workers):
            programs = HOSTILE if number % 3 == 0 else BENIGN
            source, ends = programs[number // 3 % len(programs)]
            facts = cell.run(python(source, b"1 2\n", LIMITS))
            if facts.end not in ends:
                wrong.append(f"{source!r}: {facts}")
        cell.close()
        return wrong

    with ThreadPoolExecutor(workers) as executor:
        return [line for lines in executor.map(part, range(workers)) for line in lines]


def main() -> int:
    parser = ArgumentParser(prog="python -m tests.judge.soak")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--sandbox", choices=SANDBOXES, default="zygote")
    options = parser.parse_args()
    before, began = held(), time.monotonic()
    sandbox = SANDBOXES[options.sandbox]()
    wrong = soak(sandbox, options.runs)
    sandbox.close()
    after = held()
    print(f"{options.runs} runs, a third hostile, in {time.monotonic() - began:.0f} s\nbefore {before}\nafter  {after}")
    print(f"{len(wrong)} ended otherwise than they should", *wrong[:10], sep="\n")
    return 0 if before == after and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
