"""Folders that appear completely or not at all, and the tracker that names the newest.

Writing `root/name`: everything goes into `root/name.unfinished`; then come the manifest, fsync, `tracker.next` with the
name, the rename to `root/name`, that of `tracker.next` to `tracker`, and the removal of the oldest. A process that dies
at any moment leaves either no `root/name`, or a complete one that `latest` finds.
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gppo_megatron.checkpoint.manifest import FileRecord, check_sizes, write_manifest
from gppo_megatron.errors import CheckpointError

TRACKER = "latest"
NEXT = ".next"
UNFINISHED, REMOVED = ".unfinished", ".removed"
GIB = 2**30


@contextmanager
def new_folder(
    root: Path,
    name: str,
    *,
    needed_bytes: int = 0,
    tracker: str | None = TRACKER,
    keep: int | None = None,
    resumable: bool = False,
    hashed: Mapping[str, FileRecord] | None = None,
) -> Iterator[Path]:
    """Give a temporary folder to write into; it becomes `root/name` when the block ends without an error.

    needed_bytes: what will be written, to refuse too little room at once. tracker: the file of `root` that names the
    newest folder, None for none; where there is one, `root` belongs to one writer, and what others left unfinished
    there is removed. keep: how many published folders stay, this one among them; None for all. resumable: an
    unfinished folder of this name is continued, and stays after an error. hashed: records of files hashed while
    they were written, by relative path; filled in by the time the block ends.

    In a run of several processes one of them is in this block; all of them write.
    Raises CheckpointError where `root/name` exists, is being written by another process, or cannot be written.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1 (got {keep})")
    target, temporary = root / name, root / f"{name}{UNFINISHED}"
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists already; a checkpoint is never overwritten: choose another name")
    with _as_checkpoint_error(target):
        root.mkdir(parents=True, exist_ok=True)
        _check_room(root, needed_bytes)
        if tracker is not None:
            _remove_leftovers(root, but=temporary)
        with _held(temporary):
            try:
                if not resumable:
                    _empty(temporary)
                yield temporary
                write_manifest(temporary, hashed or {})
                _publish(temporary, target, tracker)
            except BaseException:
                if not resumable:
                    shutil.rmtree(temporary, ignore_errors=True)
                raise
        if tracker is not None and keep is not None:
            _prune(root, target, keep)


def latest(root: Path, tracker: str = TRACKER) -> Path | None:
    """The newest published folder, all its files there with the right sizes; None where nothing was ever published.

    Raises CheckpointError where the folder that the tracker names is gone or incomplete.
    """
    # A writer that died between its two renames has published the folder that `tracker.next` names.
    for file in (root / f"{tracker}{NEXT}", root / tracker):
        try:
            name = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            continue
        if file.name == tracker:
            _check_named(root, name, file)
            return root / name
        if _is_a_name(name) and _is_published(root / name):
            return root / name
    return None


def published(root: Path) -> list[Path]:
    """The complete folders of `root`, oldest first: by the number their names end with, then by name."""
    folders = [path for path in root.iterdir() if path.is_dir() and _is_published(path)] if root.is_dir() else []
    return sorted(folders, key=_age)


def is_unfinished(folder: Path) -> bool:
    """Whether this is what a writer left behind, or is still writing."""
    return folder.name.endswith((UNFINISHED, REMOVED))


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's list of names, before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_named(root: Path, name: str, file: Path) -> None:
    try:
        if not _is_a_name(name):
            raise CheckpointError(f"it holds {name!r}, which is no folder's name")
        check_sizes(root / name)
    except CheckpointError as error:
        others = [folder.name for folder in published(root)]
        advice = f"write {others[-1]} into it to go back to that one" if others else "no folder here is complete"
        raise CheckpointError(f"{file} does not name a complete checkpoint: {error}; {advice}") from error


def _is_a_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and not is_unfinished(Path(name))


def _is_published(folder: Path) -> bool:
    try:
        check_sizes(folder)
    except CheckpointError:
        return False
    return not is_unfinished(folder)


def _age(folder: Path) -> tuple[int, str]:
    number = re.search(r"\d+$", folder.name)
    return (int(number.group()) if number else -1, folder.name)


def _check_room(root: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{root}: {needed_bytes / GIB:.2f} GiB are to be written and {free / GIB:.2f} GiB are free; "
            "free some space, or write elsewhere"
        )


@contextmanager
def _as_checkpoint_error(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise CheckpointError(f"{target} cannot be written: {reason}") from error


@contextmanager
def _held(temporary: Path) -> Iterator[None]:
    """Own the temporary folder while writing; a process that dies lets go of it."""
    temporary.mkdir(exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        if not try_lock(descriptor):
            raise CheckpointError(f"{temporary} is being written by another process; wait for it, or stop it")
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take an open folder's lock; False where another process holds it.

    Some network disks have no locks: there nobody is kept out.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL):
            raise
    return True


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _publish(temporary: Path, target: Path, tracker: str | None) -> None:
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    root = target.parent
    if tracker is not None:
        announced = root / f"{tracker}{NEXT}"
        announced.write_text(f"{target.name}\n", encoding="utf-8")
        sync(announced)
        sync(root)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} was made by another process meanwhile; a checkpoint is never overwritten")
    temporary.rename(target)
    sync(root)
    if tracker is not None:
        announced.replace(root / tracker)
        sync(root)


def _remove_leftovers(root: Path, but: Path) -> None:
    for path in root.iterdir():
        if path == but or not path.is_dir() or path.is_symlink() or not is_unfinished(path):
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if try_lock(descriptor):  # else somebody is at it
                shutil.rmtree(path)
        finally:
            os.close(descriptor)


def _prune(root: Path, newest: Path, keep: int) -> None:
    others = [folder for folder in published(root) if folder != newest]
    for folder in others[: max(0, len(others) - (keep - 1))]:
        # Half removed, it must not look like a checkpoint.
        doomed = folder.with_name(folder.name + REMOVED)
        folder.rename(doomed)
        shutil.rmtree(doomed)
