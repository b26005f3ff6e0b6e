"""Copies what processes write to this process's stderr, a whole line at a time, each with its prefix. No threads."""

import os
import selectors
import sys
from dataclasses import dataclass
from typing import IO

CHUNK = 65_536


@dataclass
class _Pipe:
    stream: IO[bytes]
    prefix: str
    partial: bytes = b""


class Output:
    """Pipes to copy. A pipe ends when its last writer is gone, or at `close`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, stream: IO[bytes], prefix: str) -> None:
        os.set_blocking(stream.fileno(), False)
        self._selector.register(stream, selectors.EVENT_READ, _Pipe(stream, prefix))

    def forward(self, seconds: float) -> None:
        """Copy what there is, waiting at most `seconds` for something."""
        for key, _ in self._selector.select(seconds):
            self._read(key.data)

    def drain(self) -> None:
        """Copy what is left, without waiting."""
        for key in list(self._selector.get_map().values()):
            while self._read(key.data):
                pass

    def close(self) -> None:
        """Copy what is left, and let go of every pipe."""
        self.drain()
        for key in list(self._selector.get_map().values()):
            self._end(key.data)
        self._selector.close()

    def _read(self, pipe: _Pipe) -> bool:
        """Copy one chunk; whether there was one."""
        try:
            chunk = os.read(pipe.stream.fileno(), CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._end(pipe)
            return False
        *lines, pipe.partial = (pipe.partial + chunk).split(b"\n")
        for line in lines:
            _write(pipe.prefix, line)
        return True

    def _end(self, pipe: _Pipe) -> None:
        if pipe.partial:
            _write(pipe.prefix, pipe.partial)
        self._selector.unregister(pipe.stream)
        pipe.stream.close()


def _write(prefix: str, line: bytes) -> None:
    print(prefix + line.decode("utf-8", errors="replace"), file=sys.stderr, flush=True)
