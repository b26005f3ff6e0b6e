"""Process groups: each started process leads one, so that what it starts in turn ends with it."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from subprocess import Popen

SIGNALS = {number.value: number.name for number in signal.Signals}
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def ending(status: int) -> str:
    """How a process ended. status: its exit status, or minus the signal that killed it."""
    if status < 0:
        return f"was killed by signal {SIGNALS.get(-status, -status)}"
    return f"exited with status {status}"


def signal_group(process: Popen[bytes], number: int) -> None:
    """Send a signal to all that is left of the group that `process` leads."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def dying_with(launcher: int) -> Callable[[], None]:
    """What a new process does first: on Linux, ask to be killed when the launcher dies, however that happens."""

    def ask() -> None:
        if _LIBC is not None:
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before we asked
                os._exit(1)

    return ask
