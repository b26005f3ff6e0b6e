"""Publishes numbered folders for ever, to be killed: `python -m tests.unit.checkpoint_writer ROOT`."""

import sys
from pathlib import Path

from gppo_megatron.checkpoint.folder import latest, new_folder, published

FILES, BYTES, KEEP = 4, 200_000, 2


def content(number: int, file: int) -> bytes:
    return f"{number}/{file} ".encode() * (BYTES // 8)


def write_for_ever(root: Path) -> None:
    """Numbers go on from the newest folder there is."""
    newest = latest(root)
    number = 0 if newest is None else int(newest.name.removeprefix("step-"))
    while True:
        number += 1
        with new_folder(root, f"step-{number}", keep=KEEP) as folder:
            (folder / "part").mkdir()
            for file in range(FILES):
                (folder / "part" / f"{file}.bin").write_bytes(content(number, file))
        print(number, len(published(root)), flush=True)


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]))
