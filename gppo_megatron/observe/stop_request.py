"""SIGTERM as a wish: the run ends at the next step's end, not in the middle of one."""

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Self


class StopRequest:
    """Inside its `with`, which the main thread must enter, SIGTERM is noted and does nothing else."""

    def __init__(self) -> None:
        self._came = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __enter__(self) -> Self:
        self._handler = signal.signal(signal.SIGTERM, self._note)
        # The interpreter's own handler writes here at once, even while the main thread waits inside a collective.
        self._descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._descriptor)
        signal.signal(signal.SIGTERM, self._handler)

    def came(self) -> bool:
        """Whether this process was told to stop, as far as the main thread could take note."""
        return self._came

    def wait(self, seconds: float) -> bool:
        """For another thread: wait for SIGTERM, at most so long; whether it came while waiting."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        return bool(ready) and signal.SIGTERM in os.read(self._read, 64)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
