"""How pool and worker talk over a stream socket: a length of four bytes, then that many bytes of JSON.

JSON, not pickle: a worker runs code that model answers steer, so nothing it sends may run in the trainer.
"""

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct(">I")


def encode(message: object) -> bytes:
    """One message as bytes. Raises TypeError for what JSON cannot hold."""
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Puts messages together from pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes, one by one. Raises ValueError on reaching a body that is not JSON."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield json.loads(body)
