"""The list of a folder's files that makes it complete: `manifest.json`, written last."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from gppo_megatron.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
HASHING_THREADS = 4


@dataclass(frozen=True)
class FileRecord:
    """What one file holds: its size in bytes, and the SHA-256 of its content in hexadecimal."""

    bytes: int
    sha256: str


def record_of(file: Path) -> FileRecord:
    """Reads the file in small pieces, whatever its size."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return FileRecord(os.fstat(stream.fileno()).st_size, digest.hexdigest())


def write_manifest(folder: Path, known: Mapping[str, FileRecord]) -> None:
    """List every file of `folder`. known: records of files that were hashed while they were written.

    Raises CheckpointError for a folder without files, or one that holds anything but files and folders.
    """
    files = files_of(folder)
    if not files:
        raise CheckpointError(f"{folder}: nothing was written, so there is nothing to publish")
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        records = list(threads.map(lambda name: known.get(name) or record_of(folder / name), files))
    listed = {name: asdict(record) for name, record in zip(files, records, strict=True)}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": listed}, indent=1) + "\n", encoding="utf-8")


def files_of(folder: Path) -> list[str]:
    """The files below `folder` but its manifest, as relative paths with `/`, sorted."""
    found = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path}: neither a file nor a folder; a checkpoint holds nothing else")
        if path.is_file():
            found.append(path.relative_to(folder).as_posix())
    return sorted(name for name in found if name != MANIFEST)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The listed files. Raises CheckpointError for a folder that was never published, or a manifest that is damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}: {_why_no_manifest(folder)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest of format {FORMAT}, the one this version reads")
    try:
        records = {str(name): FileRecord(**record) for name, record in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error!r})") from error
    outside = [name for name in records if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]
    if outside:
        raise CheckpointError(f"{folder / MANIFEST} lists files outside the folder: {', '.join(outside)}")
    return records


def _why_no_manifest(folder: Path) -> str:
    inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    if inside:
        return f"name one of the folders in it that have one ({', '.join(inside)})"
    return (
        "writing it was never completed, or it is no folder of gppo convert or of a run's checkpoints "
        "(gppo convert inspect tells what it is)"
    )


def check_sizes(folder: Path) -> dict[str, FileRecord]:
    """The listed files, all there with the listed sizes; their content is not read. Raises CheckpointError."""
    records = read_manifest(folder)
    for name, record in records.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        if file.stat().st_size != record.bytes:
            raise CheckpointError(f"{folder}: {name} has {file.stat().st_size} bytes instead of {record.bytes}")
    return records


def verify(folder: Path) -> None:
    """Read every listed file and compare. Raises CheckpointError with one sentence on the first that is wrong."""
    records = check_sizes(folder)
    try:
        with ThreadPoolExecutor(HASHING_THREADS) as threads:
            found = list(threads.map(lambda name: record_of(folder / name), records))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    for (name, record), now in zip(records.items(), found, strict=True):
        if now != record:
            raise CheckpointError(f"{folder}: the content of {name} has changed since it was written (SHA-256 differs)")
