"""Files to rows: every format gives the same rows, and whatever is damaged is named with its file and row."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gppo_megatron.data.files.readers import columns_of, files_of, read_rows
from gppo_megatron.errors import DataError

ROWS = [{"prompt": f"{place}+1 = \u00fc?", "answer": str(place + 1), "extra": {"place": place}} for place in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), file)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.parquet": lambda file: write_parquet(file, ROWS),
    "a.jsonl": lambda file: file.write_text(LINES, encoding="utf-8"),
    "bom.jsonl": lambda file: file.write_bytes(b"\xef\xbb\xbf" + LINES.encode()),
    "no-last-newline.jsonl": lambda file: file.write_text(LINES.rstrip("\n"), encoding="utf-8"),
    "a.jsonl.gz": lambda file: file.write_bytes(gzip.compress(LINES.encode())),
    "list.json": lambda file: file.write_text(json.dumps(ROWS, indent=1), encoding="utf-8"),
    "one-line-list.json": lambda file: file.write_text(json.dumps(ROWS), encoding="utf-8"),
    "lines.json": lambda file: file.write_text(LINES, encoding="utf-8"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    WRITERS[name](file)
    rows = list(read_rows(file, ("prompt", "answer", "extra")))
    assert [dict(row.values) for row in rows] == ROWS
    assert [str(row.origin) for row in rows] == [f"{name} row {number}" for number in range(1, 6)]
    assert columns_of(file) == ("prompt", "answer", "extra")


def test_of_parquet_only_the_named_columns_are_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ROWS)
    assert [row.values for row in read_rows(tmp_path / "a.parquet", ("answer",))][1] == {"answer": "2"}


def test_a_parquet_row_is_counted_over_batches_and_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"place": list(range(1, 3001))}), tmp_path / "a.parquet", row_group_size=700)
    rows = list(read_rows(tmp_path / "a.parquet", ("place",)))
    assert [row.origin.number for row in rows] == [row.values["place"] for row in rows] == list(range(1, 3001))


def test_blank_lines_count_as_rows_of_the_file_but_hold_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"a": 1}\n\n{"a": 2}\n\n')
    assert [row.origin.number for row in read_rows(tmp_path / "a.jsonl", ())] == [2, 4]


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"a": 1}\n')


def found(path: Path | str, folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in files_of(str(path))]


def test_files_are_found_in_order(tmp_path: Path) -> None:
    touch(tmp_path, "train-2.jsonl", "train-10.jsonl", "train-1.jsonl.gz", "test.jsonl", "[a].jsonl")
    assert found(tmp_path / "test.jsonl", tmp_path) == ["test.jsonl"]
    assert found(tmp_path / "train-*", tmp_path) == ["train-1.jsonl.gz", "train-10.jsonl", "train-2.jsonl"]
    assert found(tmp_path / "[a].jsonl", tmp_path) == ["[a].jsonl"]


def test_a_folder_gives_its_data_and_not_its_descriptions(tmp_path: Path) -> None:
    touch(tmp_path, "README.md", "dataset_infos.json", "data/b.parquet", "data/a.jsonl", ".cache/x.jsonl")
    assert found(tmp_path, tmp_path) == ["data/a.jsonl", "data/b.parquet"]
    touch(tmp_path / "only", "README.md", "b.json", "a.json")
    assert found(tmp_path / "only", tmp_path) == ["only/a.json", "only/b.json"]


def test_a_folder_of_several_splits_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "train-00000.parquet", "latest.jsonl", "test-00000.parquet")
    with pytest.raises(
        DataError, match=r"holds the splits test, train; name one of them by a pattern, such as .*\*test\*$"
    ):
        files_of(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "none.jsonl: no such file or folder, and no file matches it"),
        ("none-*.jsonl", r"none-\*.jsonl: no such file or folder"),
        ("a.csv", "a.csv: not a kind of file that is read; those are .parquet, .jsonl, .jsonl.gz, .json"),
        ("empty", "empty: the folder holds no .parquet, .jsonl, .jsonl.gz, .json file"),
    ],
)
def test_paths_without_data_are_refused(tmp_path: Path, name: str, message: str) -> None:
    touch(tmp_path, "a.csv", "empty/notes.txt")
    with pytest.raises(DataError, match=message):
        files_of(str(tmp_path / name))


def truncated(write: Callable[[Path], object], keep: float) -> Callable[[Path], object]:
    def write_part(file: Path) -> None:
        write(file)
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * keep)])

    return write_part


def damaged_page(file: Path) -> None:
    write_parquet(file, [{"prompt": f"{place} is a long enough text to be compressed" * 9} for place in range(50)])
    data = bytearray(file.read_bytes())
    data[40:400] = bytes(360)
    file.write_bytes(data)


def gzipped(text: str) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(gzip.compress(text.encode()))


def text(content: str | bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content if isinstance(content, bytes) else content.encode())


DAMAGED: list[tuple[str, Callable[[Path], object], str]] = [
    ("a.parquet", truncated(WRITERS["a.parquet"], 0.9), "a.parquet: not a whole parquet file"),
    ("a.parquet", damaged_page, r"a.parquet: damaged after row \d+ \("),
    ("a.parquet", text(""), "a.parquet: not a whole parquet file"),
    ("a.parquet", text(LINES), "a.parquet: not a whole parquet file"),
    ("a.parquet", lambda file: pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), file), "no rows"),
    ("a.jsonl", text('{"a": 1}\n{"a": \n'), "a.jsonl row 2: not valid JSON: Expecting value at column"),
    ("a.jsonl", text('{"a": 1}\n[2]\n'), "a.jsonl row 2: must be an object, but is a list"),
    ("a.jsonl", text(b'{"a": 1}\n{"a": "\xff"}\n'), "a.jsonl row 2: 'utf-8' codec can't decode byte 0xff"),
    ("a.jsonl", text("a,b\n1,2\n"), "a.jsonl row 1: not valid JSON"),
    ("a.jsonl", text("[" * 100_000), "a.jsonl row 1: "),
    ("a.jsonl", text(""), "a.jsonl: holds no rows"),
    ("a.jsonl", text("\n\n"), "a.jsonl: holds no rows"),
    ("a.jsonl", WRITERS["a.parquet"], "a.jsonl: holds parquet, which its name does not say"),
    ("a.jsonl", gzipped(LINES), "a.jsonl: holds gzip, which its name does not say"),
    ("a.jsonl.gz", text(LINES), "a.jsonl.gz: is not gzipped"),
    ("a.jsonl.gz", text(""), "a.jsonl.gz: holds no rows"),
    ("a.jsonl.gz", truncated(gzipped(LINES), 0.7), r"a.jsonl.gz: damaged after row \d"),
    ("a.json", text('{\n"a": 1}'), "a.json: must hold a list of rows, but holds a dict"),
    ("a.json", text('[\n{"a": 1},\n{"a" 2}]'), "a.json row 3: not valid JSON: Expecting ':' delimiter at column 6"),
    ("a.json", text('[{"a": 1}, 2]'), "a.json row 2: must be an object, but is a int"),
    ("a.json", text("[]"), "a.json: holds no rows"),
    ("a.json", text(""), "a.json: holds no rows"),
]


@pytest.mark.parametrize(("name", "write", "message"), DAMAGED)
def test_damage_is_named(tmp_path: Path, name: str, write: Callable[[Path], object], message: str) -> None:
    file = tmp_path / name
    write(file)
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows(file, ("prompt",) if name.endswith("parquet") else ()))
    assert "\n" not in str(caught.value)
