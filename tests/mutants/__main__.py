"""`python -m tests.mutants [--list] [NAME ...]`: exit code 0 when every fault is noticed."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from tests.mutants import objective, parallel, policy, rollout
from tests.mutants.fault import Fault
from tests.mutants.run import Finding, examine, examine_unmutated, take_snapshot

ROOT = Path(__file__).parents[2]
FAULTS = (*objective.FAULTS, *rollout.FAULTS, *policy.FAULTS, *parallel.FAULTS)
AT_ONCE = 2


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Seed faults; the tests must notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these faults")
    parser.add_argument("--list", action="store_true", help="show the faults and run nothing")
    options = parser.parse_args(arguments)
    by_name = {fault.name: fault for fault in FAULTS}
    assert len(by_name) == len(FAULTS), "two faults have one name"
    unknown = sorted(set(options.names) - set(by_name))
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}")
    chosen = [by_name[name] for name in options.names] or list(FAULTS)
    if options.list:
        print("\n".join(f"| {fault.name} | {fault.file} | {fault.caught_by} |" for fault in chosen))
        return 0
    with tempfile.TemporaryDirectory(prefix="gppo-mutants-", ignore_cleanup_errors=True) as folder:
        findings = list(_findings(chosen, Path(folder)))
    failed = sum(not finding.passed for finding in findings)
    print(f"{len(findings) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _findings(faults: Sequence[Fault], folder: Path) -> Iterator[Finding]:
    """The unmutated copy's first, and the faults' only if that one passed."""
    snapshot = folder / "snapshot"
    take_snapshot(ROOT, snapshot)
    first = _timed("unmutated", partial(examine_unmutated, snapshot, folder / "unmutated"))
    yield first
    if not first.passed:
        return
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for future in as_completed(
            pool.submit(_timed, fault.name, partial(examine, fault, snapshot, folder / fault.name)) for fault in faults
        ):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _timed(name: str, examination: Callable[[], Finding]) -> Finding:
    start = time.perf_counter()
    finding = examination()
    verdict = "ok  " if finding.passed else "FAIL"
    print(f"{verdict} {time.perf_counter() - start:5.1f} s  {name}: {finding.text}", flush=True)
    return finding


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
