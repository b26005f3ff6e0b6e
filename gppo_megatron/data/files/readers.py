"""Rows out of files, one at a time: parquet, JSON lines (gzipped or not) and JSON lists.

Only a JSON list is held in memory as a whole; of parquet only the columns that are asked for are read.
"""

import glob
import gzip
import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from gppo_megatron.errors import DataError

BATCH_ROWS = 1024
FORMATS = (".parquet", ".jsonl", ".jsonl.gz", ".json")
SPLIT = re.compile(r"(?<![a-z])(train|test|validation|val|dev)(?![a-z])")
MAGIC = {b"PAR1": "parquet", b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip"}


@dataclass(frozen=True, slots=True)
class Origin:
    """A row's place: its file, and its number there from 1 (in JSON lines, the line's)."""

    file: Path
    number: int

    def __str__(self) -> str:
        return f"{self.file.name} row {self.number}"


@dataclass(frozen=True, slots=True)
class Row:
    origin: Origin
    values: Mapping[str, Any]


def files_of(path: str) -> list[Path]:
    """The files that `path` names, sorted: itself, a folder's (hidden ones left out), or those a pattern matches.

    A folder's .json files count only where it holds no other format: next to others they describe the data set.
    Raises DataError where there is none, for a file of an unknown kind, and for a folder that mixes splits.
    """
    place = Path(path)
    if place.is_dir():
        return _folder_files(place)
    files = [place] if place.is_file() else sorted(Path(name) for name in glob.glob(path, recursive=True))
    files = [file for file in files if file.is_file()]
    if not files:
        raise DataError(f"{path}: no such file or folder, and no file matches it as a pattern")
    strangers = [file for file in files if _format(file) is None]
    if strangers:
        raise DataError(f"{strangers[0]}: not a kind of file that is read; those are {', '.join(FORMATS)}")
    return files


def columns_of(file: Path) -> tuple[str, ...]:
    """The file's columns; of JSON, those of its first row. Raises DataError for a file without rows."""
    if _format(file) == ".parquet":
        with _open_parquet(file) as parquet:
            return tuple(parquet.schema_arrow.names)
    for row in read_rows(file, ()):
        return tuple(row.values)
    raise DataError(f"{file}: holds no rows")


def read_rows(file: Path, columns: Collection[str]) -> Iterator[Row]:
    """The file's rows in order; of parquet only `columns` (all must exist), of JSON whatever a row holds.

    Raises DataError, naming the row, where the file is damaged or holds something other than rows.
    """
    match _format(file):
        case ".parquet":
            yield from _parquet_rows(file, columns)
        case ".jsonl" | ".jsonl.gz":
            yield from _json_lines(file)
        case _:
            yield from _json_list(file)


def _format(file: Path) -> str | None:
    return next((suffix for suffix in FORMATS if file.name.endswith(suffix)), None)


def _folder_files(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.rglob("*") if file.is_file() and _format(file))
    found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    files = [file for file in found if _format(file) != ".json"] or found
    if not files:
        raise DataError(f"{folder}: the folder holds no {', '.join(FORMATS)} file")
    splits = {match[1] for file in files if (match := SPLIT.search(file.name.lower()))}
    if len(splits) > 1:
        raise DataError(
            f"{folder}: the folder holds the splits {', '.join(sorted(splits))}; name one of them by a pattern, "
            f"such as {folder}/*{sorted(splits)[0]}*"
        )
    return files


def _open_parquet(file: Path) -> Any:
    try:
        return pyarrow.parquet.ParquetFile(file, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a whole parquet file ({_one_line(error)})") from error


def _parquet_rows(file: Path, columns: Collection[str]) -> Iterator[Row]:
    number = 0
    with _open_parquet(file) as parquet:
        try:
            for batch in parquet.iter_batches(BATCH_ROWS, columns=list(columns)):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(Origin(file, number), values)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: damaged after row {number} ({_one_line(error)})") from error
    if not number:
        raise DataError(f"{file}: holds no rows")


def _open(file: Path) -> BufferedIOBase:
    try:
        with file.open("rb") as stream:
            head = stream.read(4)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    kind = next((name for magic, name in MAGIC.items() if head.startswith(magic)), "")
    gzipped = file.suffix == ".gz"
    if kind and not (gzipped and kind == "gzip"):
        raise DataError(f"{file}: holds {kind}, which its name does not say; rename it")
    if gzipped and kind != "gzip":
        raise DataError(f"{file}: {'holds no rows' if not head else 'is not gzipped; rename it'}")
    return gzip.open(file) if gzipped else file.open("rb")


def _json_lines(file: Path) -> Iterator[Row]:
    number, empty = 0, True
    with _open(file) as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    empty = False
                    yield _json_row(Origin(file, number), _parsed(file, number, line.rstrip()))
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{file}: damaged after row {number} ({_one_line(error)})") from error
    if empty:
        raise DataError(f"{file}: holds no rows")


def _json_list(file: Path) -> Iterator[Row]:
    with _open(file) as stream:
        first = next((line.strip() for line in stream if line.strip()), b"").removeprefix(b"\xef\xbb\xbf")
    if first.startswith(b"{") and first.endswith(b"}"):
        yield from _json_lines(file)  # JSON lines go by the name .json as well
        return
    rows = _parsed(file, 1, file.read_bytes()) if first else []
    if not isinstance(rows, list):
        raise DataError(f"{file}: must hold a list of rows, but holds a {type(rows).__name__}")
    if not rows:
        raise DataError(f"{file}: holds no rows")
    for number, values in enumerate(rows, 1):
        yield _json_row(Origin(file, number), values)


def _parsed(file: Path, number: int, text: bytes) -> Any:
    """JSON; `number` is that of the line the text begins at."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        row = number + error.lineno - 1
        raise DataError(f"{file} row {row}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} row {number}: {_one_line(error)}") from error


def _json_row(origin: Origin, values: Any) -> Row:
    if not isinstance(values, dict):
        raise DataError(f"{origin.file} row {origin.number}: must be an object, but is a {type(values).__name__}")
    return Row(origin, values)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
