"""The files of a conversion, written by several processes, one journal entry a finished file: so it can go on later."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from checkpoints_tools.targets import HashingStream, Placed, Target
from gppo_megatron.checkpoint.folder import sync
from gppo_megatron.checkpoint.manifest import FileRecord
from gppo_megatron.errors import CheckpointError
from gppo_megatron.parent_death import end_with
from gppo_megatron.policy.megatron.mapping.pieces import StoredParameter

JOURNAL = ".journal"
FILE_BYTES = 256 * 2**20
"""A file is the unit of progress and of going on after an interruption."""
GIB = 2**30


@dataclass(frozen=True)
class PlannedFile:
    """One file to write. bytes: of its tensors' numbers."""

    name: str
    parameters: tuple[StoredParameter, ...]
    bytes: int


@dataclass(frozen=True)
class WrittenFile:
    """One file that is on disk: what the manifest says of it, and where in it boxes lie."""

    name: str
    record: FileRecord
    placed: tuple[Placed, ...]


def planned_files(
    parameters: tuple[StoredParameter, ...], target: Target, name: Callable[[int, int], str], file_bytes: int
) -> list[PlannedFile]:
    """Parameters in order, in files of at most `file_bytes`, or of one parameter. name: of file i (from 0) of n."""
    groups: list[list[StoredParameter]] = [[]]
    size = 0
    for parameter in parameters:
        more = target.bytes(parameter)
        if groups[-1] and size + more > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += more
    return [
        PlannedFile(name(i, len(groups)), tuple(group), sum(map(target.bytes, group))) for i, group in enumerate(groups)
    ]


def write_files(
    folder: Path, files: list[PlannedFile], target: Target, stamp: str, processes: int, say: Callable[[str], None]
) -> list[WrittenFile]:
    """Write every file that is not there yet. stamp: what the content follows from; another one starts afresh.

    Raises CheckpointError for what `target` refuses, a full disk, or a process that was killed.
    """
    # What is there from another conversion is of no use to this one.
    journal = folder / JOURNAL
    _keep_only(folder, {file.name for file in files})
    journal.mkdir(exist_ok=True)
    done = [entry for file in files if (entry := _finished(folder, file, stamp)) is not None]
    names = {entry.name for entry in done}
    left = [file for file in files if file.name not in names]
    if done:
        say(f"going on: {len(done)} of {len(files)} files are there already")
    progress = Progress(sum(file.bytes for file in left), say)
    # The largest first: the last file to end then ends early.
    order = sorted(left, key=lambda file: -file.bytes)
    for written, planned in _written(folder, order, target, stamp, processes):
        done.append(written)
        progress.add(planned.bytes)
    return sorted(done, key=lambda entry: entry.name)


def forget_journal(folder: Path) -> None:
    """To be called when every file is there: the journal is no part of the checkpoint."""
    shutil.rmtree(folder / JOURNAL)


class Progress:
    """One line at most every second: bytes, rate, time left."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._total, self._say, self._done = total, say, 0
        self._start = self._said = time.monotonic()

    def add(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._said < 1 and self._done < self._total:
            return
        self._said = now
        rate = self._done / max(now - self._start, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        self._say(f"{self._done / GIB:.2f} of {self._total / GIB:.2f} GiB, {rate / 2**20:.0f} MiB/s, {left:.0f} s left")


def _written(
    folder: Path, files: list[PlannedFile], target: Target, stamp: str, processes: int
) -> Iterator[tuple[WrittenFile, PlannedFile]]:
    if processes == 1 or len(files) < 2:
        for file in files:
            yield write_file(folder, file, target, stamp), file
        return
    context = multiprocessing.get_context("spawn")
    count = min(processes, len(files))
    with ProcessPoolExecutor(count, context, _end_with_parent, (os.getpid(),)) as pool:
        futures = {pool.submit(write_file, folder, file, target, stamp): file for file in files}
        try:
            for future in as_completed(futures):
                yield future.result(), futures[future]
        except BrokenProcessPool as error:
            raise CheckpointError(
                f"{folder}: a writing process was killed, perhaps for want of memory; try fewer with --processes"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent(parent: int) -> None:
    """A writer must not go on writing into a folder that nobody owns any more."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells
    torch.set_num_threads(1)


def write_file(folder: Path, file: PlannedFile, target: Target, stamp: str) -> WrittenFile:
    """Write one file and its journal entry; neither counts before both are on disk."""
    part = folder / f"{file.name}.part"
    try:
        with part.open("wb", buffering=2**20) as stream:
            hashing = HashingStream(stream)
            placed = target.write(file.parameters, hashing)
    except RuntimeError as error:  # torch's writer turns an error of the disk into one of its own
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    sync(part)
    part.replace(folder / file.name)
    written = WrittenFile(file.name, FileRecord(hashing.bytes, hashing.sha256), tuple(placed))
    entry = folder / JOURNAL / f"{file.name}.json"
    draft = entry.with_suffix(".part")
    draft.write_text(json.dumps({"plan": _plan(file, stamp), **asdict(written)}), encoding="utf-8")
    sync(draft)
    draft.replace(entry)
    return written


def _finished(folder: Path, file: PlannedFile, stamp: str) -> WrittenFile | None:
    """What the journal says of a file that was written whole by the same plan from the same source."""
    try:
        entry = json.loads((folder / JOURNAL / f"{file.name}.json").read_text(encoding="utf-8"))
        if entry["plan"] != _plan(file, stamp) or os.path.getsize(folder / file.name) != entry["record"]["bytes"]:
            return None
        placed = tuple(
            Placed(p["key"], tuple(p["offsets"]), tuple(p["sizes"]), p["offset"], p["length"]) for p in entry["placed"]
        )
        return WrittenFile(entry["name"], FileRecord(**entry["record"]), placed)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _plan(file: PlannedFile, stamp: str) -> str:
    return hashlib.sha256(f"{stamp}\n{file!r}".encode()).hexdigest()


def _keep_only(folder: Path, names: set[str]) -> None:
    for path in folder.iterdir():
        if path.name in names or path.name == JOURNAL:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
