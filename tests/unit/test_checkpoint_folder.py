"""Folders that appear completely or not at all, whatever happens to their writer."""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gppo_megatron.checkpoint import manifest
from gppo_megatron.checkpoint.folder import latest, new_folder, published
from gppo_megatron.checkpoint.manifest import MANIFEST, FileRecord, verify
from gppo_megatron.errors import CheckpointError
from tests.unit.checkpoint_writer import FILES, KEEP, content


def write(root: Path, name: str, text: str = "weights", **options: object) -> Path:
    with new_folder(root, name, **options) as folder:  # type: ignore[arg-type]
        (folder / "model").mkdir()
        (folder / "model" / "a.bin").write_text(text)
        (folder / "side.json").write_text("{}")
    return root / name


def write_then(root: Path, name: str, act: Callable[[], object], **options: object) -> None:
    """One file, and then `act` before the folder is complete."""
    with new_folder(root, name, **options) as folder:  # type: ignore[arg-type]
        (folder / "x").write_text("x")
        act()


def fail() -> None:
    raise ArithmeticError


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_published_folder_is_listed_complete_and_named_by_the_tracker(tmp_path: Path) -> None:
    folder = write(tmp_path, "step-1")
    verify(folder)
    assert latest(tmp_path) == folder
    listed = json.loads((folder / MANIFEST).read_text())
    sha256 = hashlib.sha256(b"weights").hexdigest()
    assert listed["files"]["model/a.bin"] == {"bytes": 7, "sha256": sha256}
    assert names(tmp_path) == ["latest", "step-1"]


def test_nothing_is_published_before_the_block_ends_or_after_an_error(tmp_path: Path) -> None:
    def look_and_fail() -> None:
        assert latest(tmp_path) is None
        assert published(tmp_path) == []
        assert names(tmp_path) == ["step-1.unfinished"]
        fail()

    with pytest.raises(ArithmeticError):
        write_then(tmp_path, "step-1", look_and_fail)
    assert names(tmp_path) == []


def test_only_the_newest_stay_by_number_and_not_by_text(tmp_path: Path) -> None:
    for number in (8, 9, 10, 11):
        write(tmp_path, f"step-{number}", keep=3)
    assert [folder.name for folder in published(tmp_path)] == ["step-9", "step-10", "step-11"]
    assert latest(tmp_path) == tmp_path / "step-11"


def test_the_folder_just_written_stays_even_where_others_have_higher_numbers(tmp_path: Path) -> None:
    for number in (7, 8):
        write(tmp_path, f"step-{number}")
    write(tmp_path, "step-3", keep=1)
    assert names(tmp_path) == ["latest", "step-3"]


def test_an_existing_target_is_never_overwritten(tmp_path: Path) -> None:
    write(tmp_path, "step-1", "first")
    with pytest.raises(CheckpointError, match="step-1 exists already; a checkpoint is never overwritten"):
        write(tmp_path, "step-1", "second")
    assert (tmp_path / "step-1" / "model" / "a.bin").read_text() == "first"


def test_a_target_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="made by another process"):
        write_then(tmp_path, "a", (tmp_path / "a").mkdir)
    assert list((tmp_path / "a").iterdir()) == []


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with new_folder(tmp_path, "a") as folder:
        (folder / "x").write_text("x")
        with pytest.raises(CheckpointError, match="being written by another process"), new_folder(tmp_path, "a"):
            pass
        write(tmp_path, "b")  # whose leftovers are not a's
        assert (folder / "x").exists()
    verify(tmp_path / "a")


def test_too_little_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"9000000000.00 GiB are to be written and .* GiB are free"):
        write(tmp_path, "a", needed_bytes=9_000_000_000 * 2**30)
    assert names(tmp_path) == []


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(CheckpointError, match="a cannot be written: the disk is full"):
        write_then(tmp_path, "a", fill)
    assert names(tmp_path) == []


def test_a_resumable_folder_stays_after_an_error_and_is_continued(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        write_then(tmp_path, "a", fail, tracker=None, resumable=True)
    with new_folder(tmp_path, "a", tracker=None, resumable=True) as folder:
        assert (folder / "x").read_text() == "x"
    assert names(tmp_path) == ["a"]


def test_what_others_left_unfinished_is_removed_only_where_the_root_is_ours(tmp_path: Path) -> None:
    for name in ("old.unfinished", "step-0.removed", "a.unfinished"):
        (tmp_path / name / "deep").mkdir(parents=True)
    write(tmp_path, "a", tracker=None)
    assert names(tmp_path) == ["a", "old.unfinished", "step-0.removed"]
    assert not (tmp_path / "a" / "deep").exists()
    write(tmp_path, "b")
    assert names(tmp_path) == ["a", "b", "latest"]


def test_records_of_files_hashed_while_written_are_taken_over(tmp_path: Path) -> None:
    hashed = {}
    with new_folder(tmp_path, "a", hashed=hashed) as folder:
        (folder / "x").write_text("x")
        hashed["x"] = FileRecord(1, "0" * 64)
    with pytest.raises(CheckpointError, match="content of x has changed"):
        verify(tmp_path / "a")


def damage(folder: Path, how: str) -> None:
    file = folder / "model" / "a.bin"
    match how:
        case "flipped byte":
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1, *file.read_bytes()[1:]]))
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        case "missing":
            file.unlink()
        case "no manifest":
            (folder / MANIFEST).unlink()
        case "damaged manifest":
            (folder / MANIFEST).write_text("{")
        case "other format":
            (folder / MANIFEST).write_text('{"format": 99, "files": {}}')
        case "outside":
            (folder / MANIFEST).write_text('{"format": 1, "files": {"../x": {"bytes": 0, "sha256": ""}}}')


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("flipped byte", r"the content of model/a.bin has changed since it was written \(SHA-256 differs\)$"),
        ("truncated", "model/a.bin has 6 bytes instead of 7$"),
        ("missing", "model/a.bin is missing$"),
        ("no manifest", "has no manifest.json: writing it was never completed, or it is no folder of gppo convert"),
        ("damaged manifest", "manifest.json cannot be read"),
        ("other format", "not a manifest of format 1, the one this version reads$"),
        ("outside", r"lists files outside the folder: \.\./x$"),
    ],
)
def test_damage_is_one_sentence(tmp_path: Path, how: str, message: str) -> None:
    folder = write(tmp_path, "a")
    damage(folder, how)
    with pytest.raises(CheckpointError, match=message) as caught:
        verify(folder)
    assert "\n" not in str(caught.value)


def test_a_tracker_that_names_a_damaged_folder_says_which_one_is_complete(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path, f"step-{number}")
    damage(tmp_path / "step-2", "truncated")
    with pytest.raises(CheckpointError, match=r"latest does not name a complete .* write step-1 into it"):
        latest(tmp_path)
    (tmp_path / "latest").write_text("step-1\n")
    assert latest(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize("text", ["", "..", "a/b", "/etc", "a.unfinished"])
def test_a_tracker_names_a_folder_beside_it_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest").write_text(text)
    with pytest.raises(CheckpointError, match="which is no folder's name"):
        latest(tmp_path)


def test_a_folder_published_by_a_writer_that_died_before_the_tracker_is_found(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path, f"step-{number}")
    (tmp_path / "latest").write_text("step-1\n")
    (tmp_path / "latest.next").write_text("step-2\n")
    assert latest(tmp_path) == tmp_path / "step-2"
    shutil.rmtree(tmp_path / "step-2")
    assert latest(tmp_path) == tmp_path / "step-1"


def test_an_empty_folder_and_a_link_are_not_published(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing was written"), new_folder(tmp_path, "a"):
        pass
    with pytest.raises(CheckpointError, match="neither a file nor a folder"), new_folder(tmp_path, "a") as folder:
        (folder / "link").symlink_to("/etc/passwd")


def test_a_file_is_hashed_in_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """64 MiB are read with a few hundred KiB at a time."""
    file = tmp_path / "big"
    file.write_bytes(bytes(64 * 2**20))
    largest = 0
    original = manifest.hashlib.file_digest

    class Counting:
        def __init__(self, stream: object) -> None:
            self.stream = stream

        def readinto(self, buffer: memoryview) -> int:
            nonlocal largest
            largest = max(largest, len(buffer))
            return self.stream.readinto(buffer)  # type: ignore[attr-defined,no-any-return]

        def readable(self) -> bool:
            return True

    digest = SimpleNamespace(file_digest=lambda stream, name: original(Counting(stream), name))
    monkeypatch.setattr(manifest, "hashlib", digest)
    assert manifest.record_of(file).bytes == 64 * 2**20
    assert 0 < largest <= 2**20


def test_a_writer_killed_at_twenty_moments_never_leaves_a_folder_that_is_not_complete(tmp_path: Path) -> None:
    """Every folder that counts as published has its exact content, and `latest` never goes back."""
    moments, seen = random.Random(7), 0
    for _ in range(20):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.checkpoint_writer", str(tmp_path)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(moments.uniform(0.0, 0.05))
        writer.kill()
        writer.communicate()
        for folder in published(tmp_path):
            verify(folder)
            number = int(folder.name.removeprefix("step-"))
            assert [(folder / "part" / f"{file}.bin").read_bytes() for file in range(FILES)] == [
                content(number, file) for file in range(FILES)
            ]
        newest = latest(tmp_path)
        assert newest is not None
        number = int(newest.name.removeprefix("step-"))
        assert number > seen
        assert newest == published(tmp_path)[-1]
        seen = number
        assert len(published(tmp_path)) <= KEEP + 1
    write(tmp_path, "step-100000", keep=KEEP)
    assert sum(path.is_dir() for path in tmp_path.iterdir()) == KEEP
