"""Programs a second and core: each sandbox against a bare `/usr/bin/python3 -c`, which isolates nothing.

    python benchmarks/verifiers.py

Rounds of all variants alternate, so that whatever else the machine does falls on all of them. Two figures: programs a
second of wall time with one worker, and programs a second of CPU time, which other work on the machine changes less.
CPU time is that of this process, of the runs, and of everything that was started for them; a container of Docker's is
started by the engine, so there it is not shown.
"""

import os
import subprocess
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from gppo_verifiers.code.selftest import SANDBOXES
from gppo_verifiers.sandbox.base import PYTHON, Cell, Facts, Program

SOURCE = "print(sum(map(int, input().split())))"
STDIN = b"1 2 3\n"


@dataclass
class Variant:
    """name, and one run of the program in it. wall, cpu: seconds of each round."""

    name: str
    run: Callable[[], bytes]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def bare() -> bytes:
    return subprocess.run([PYTHON, "-c", SOURCE], input=STDIN, capture_output=True).stdout


def in_cell(cell: Cell) -> Callable[[], bytes]:
    program = Program((PYTHON, "solution.py"), {"solution.py": SOURCE.encode()}, STDIN)

    def run() -> bytes:
        facts: Facts = cell.run(program)
        return facts.stdout

    return run


def cpu_seconds() -> float:
    """Of this process and all below it, living or dead."""
    ticks = 0
    parents, times = {}, {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(process)], times[int(process)] = int(fields[1]), sum(map(int, fields[11:15]))
    front = {os.getpid()}
    while front:
        ticks += sum(times[process] for process in front)
        front = {process for process, parent in parents.items() if parent in front}
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(variants: list[Variant], rounds: int, runs: int) -> None:
    for _ in range(rounds):
        for variant in variants:
            wall, cpu = time.perf_counter(), cpu_seconds()
            for _ in range(runs):
                if variant.run() != b"6\n":
                    raise RuntimeError(f"{variant.name} gave a wrong answer")
            variant.wall.append(time.perf_counter() - wall)
            variant.cpu.append(cpu_seconds() - cpu)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--runs", type=int, default=50, help="of each variant a round")
    parser.add_argument("--sandboxes", nargs="+", choices=SANDBOXES, default=list(SANDBOXES))
    options = parser.parse_args()
    with ExitStack() as opened:
        variants = [Variant("bare python3 -c", bare)]
        for name in options.sandboxes:
            sandbox = SANDBOXES[name]()
            opened.callback(sandbox.close)
            cell = sandbox.open_cell()
            opened.callback(cell.close)
            variants.append(Variant(name, in_cell(cell)))
        measure(variants, 1, 5)
        for variant in variants:
            variant.wall.clear()
            variant.cpu.clear()
        measure(variants, options.rounds, options.runs)
    runs = options.rounds * options.runs
    first = variants[0]
    print(f"{runs} runs each, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'variant':16} {'per s wall':>10} {'x bare':>7} {'per s CPU':>10} {'x bare':>7}")
    for variant in variants:
        line = f"{variant.name:16} {runs / sum(variant.wall):10.1f} {sum(first.wall) / sum(variant.wall):7.2f}"
        if variant.name != "docker":
            line += f" {runs / sum(variant.cpu):10.1f} {sum(first.cpu) / sum(variant.cpu):7.2f}"
        print(line)


if __name__ == "__main__":
    main()
