"""The process that runs verifiers; `pool.WorkerPool` starts it.

A verifier may crash, hang, print or eat memory here without harm to the trainer. The table of verifiers is imported
only once the pool can be told why that fails.
"""

import ctypes
import importlib
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from gppo_verifiers.frames import FrameReader, encode
from gppo_verifiers.types import Status, Verdict

Verifier = Callable[[Mapping[str, Any], str], Verdict]
"""(the task's payload, the answer's text) -> verdict. Raising counts as a crash: no score."""

DETAIL_CHARACTERS = 500
PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int, memory_bytes: int, cpu_seconds: int, table: str) -> int:
    """Serve answers on the socket `descriptor` until it closes. Returns the exit code.

    cpu_seconds: what one answer may use; beyond it the kernel ends the process, whatever the pool is doing.
    """
    os.set_inheritable(descriptor, False)
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer ends it when it is time
        signal.signal(number, signal.SIG_IGN)
    if not _die_with(parent):
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with socket.socket(fileno=descriptor) as channel:
        try:
            verifiers = load_table(table)
        except Exception as error:  # noqa: BLE001 - an import can raise anything; the pool tells the user
            channel.sendall(encode({"failed": f"{table}: {_describe(error)}"}))
            return 1
        channel.sendall(encode({"ready": True}))
        reader = FrameReader()
        while data := channel.recv(1 << 16):
            for message in reader.feed(data):
                _grant_cpu(cpu_seconds)
                verdict = judge_one(verifiers, message["kind"], message["payload"], message["text"])
                reply = {
                    "id": message["id"],
                    "score": verdict.score,
                    "status": verdict.status.value,
                    "detail": verdict.detail[:DETAIL_CHARACTERS],
                }
                channel.sendall(encode(reply))
    return 0


def _grant_cpu(seconds: int) -> None:
    """Let this process use `seconds` more of CPU time; SIGXCPU then ends it."""
    _, ceiling = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, ceiling))


def load_table(table: str) -> Mapping[str, Verifier]:
    """The verifiers at `module:name`. Raises whatever the import raises, and TypeError for anything else there."""
    module, _, name = table.partition(":")
    verifiers = getattr(importlib.import_module(module), name)
    if not isinstance(verifiers, Mapping):
        raise TypeError(f"{table} is {type(verifiers).__name__}, not a table of verifiers")
    return verifiers


def judge_one(verifiers: Mapping[str, Verifier], kind: str, payload: Mapping[str, Any], text: str) -> Verdict:
    """The verdict on one answer; a verifier that raises, or returns no verdict, has crashed."""
    verifier = verifiers.get(kind)
    if verifier is None:
        return Verdict(None, Status.INFRA, f"no verifier for tasks of kind {kind!r}; known: {', '.join(verifiers)}")
    try:
        verdict = verifier(payload, text)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a verifier can raise anything, and no failure may become a score
        return Verdict(None, Status.CRASH, _describe(error))
    if not isinstance(verdict, Verdict):
        return Verdict(None, Status.CRASH, f"the verifier returned {type(verdict).__name__}, not a Verdict")
    return verdict


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS]


def _die_with(parent: int) -> bool:
    """Have the kernel kill this process when `parent` ends; False where it has ended already.

    The closed socket says the same, but only to a worker that is between two answers.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:5]]
    sys.exit(main(numbers[0], numbers[1], numbers[2], numbers[3], sys.argv[5]))
