"""Processes that end when the one that started them does, however that happens: on Linux."""

import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkProcess
from multiprocessing.util import register_after_fork

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """In a process that `parent` started: be killed when it dies, at once where it is dead already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def forks_end_with_their_parent() -> None:
    """From here on, what multiprocessing forks in this process, and what that forks, ends with the one that forked it.

    The kernel means the thread that forked: only the main thread may fork then.
    """
    register_after_fork(_end_a_fork, _end_a_fork)


def _end_a_fork(_: object) -> None:
    parent = multiprocessing.parent_process()
    if isinstance(multiprocessing.current_process(), ForkProcess) and parent is not None:
        assert parent.pid is not None
        end_with(parent.pid)
