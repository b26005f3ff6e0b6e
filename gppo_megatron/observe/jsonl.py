"""`metrics.jsonl`: one JSON object a step, the record every other picture is drawn from."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from gppo_megatron.errors import CheckpointError


class JsonLines:
    """Appends `{"stage": ..., "step": ..., <metric>: <number>}` lines, keys sorted, each flushed as it is written.

    A number that is not finite becomes null, which JSON has a word for. Numbers read back exactly.
    A last line that an earlier process was killed in the middle of is removed on opening.
    """

    def __init__(self, path: Path) -> None:
        _drop_partial_line(path)
        self._file = path.open("a", encoding="utf-8", newline="\n")

    def write(self, step: int, stage: str, values: Mapping[str, float]) -> None:
        """Append one line. Raises ValueError for a metric named like one of the line's own keys."""
        if taken := values.keys() & {"stage", "step"}:
            raise ValueError(f"no metric may be called {' or '.join(sorted(taken))}")
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"stage": stage, "step": step, **numbers}, sort_keys=True, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()

    def bytes_kept(self) -> int:
        """How long the file is, once the disk holds all of it."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def cut(path: Path, length: int) -> None:
    """Cut the file back to its first `length` bytes. Raises CheckpointError for one that is shorter."""
    held = path.stat().st_size if path.exists() else 0
    if held < length:
        raise CheckpointError(f"{path} has {held} bytes, but {length} when the checkpoint was saved: lines are missing")
    if held > length:
        with path.open("r+b") as file:
            file.truncate(length)


def _drop_partial_line(path: Path) -> None:
    """Cut an existing file back to its last line break."""
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
