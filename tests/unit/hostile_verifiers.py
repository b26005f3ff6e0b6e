"""Verifiers that misbehave in every way a worker must survive."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gppo_verifiers.types import Status, Verdict

Payload = Mapping[str, Any]
YES = Verdict(1.0, Status.GRADED)


def compare(payload: Payload, text: str) -> Verdict:
    return Verdict(float(text == payload.get("right", "right")), Status.GRADED, text[:20])


def sleep(payload: Payload, text: str) -> Verdict:
    time.sleep(3600)
    return YES


def nap(payload: Payload, text: str) -> Verdict:
    time.sleep(0.1)
    return YES


def power(payload: Payload, text: str) -> Verdict:
    pow(7, 10**9)  # in C: no Python signal handler would run before it ends
    return YES


def leave(payload: Payload, text: str) -> Verdict:
    os._exit(3)


def system_exit(payload: Payload, text: str) -> Verdict:
    sys.exit(4)


def segfault(payload: Payload, text: str) -> Verdict:
    ctypes.string_at(0)
    return YES


def fail(payload: Payload, text: str) -> Verdict:
    raise RuntimeError("no such proof")


def eat_memory(payload: Payload, text: str) -> Any:
    return [mmap.mmap(-1, 1 << 26) for _ in range(1 << 20)]  # address space alone: quick on any machine


def pollute(payload: Payload, text: str) -> Verdict:
    print("x" * 100_000)
    os.write(1, b"y" * 100_000)
    os.write(2, b"z" * 100_000)
    sys.stdin.read()
    return YES


def interrupt(payload: Payload, text: str) -> Verdict:
    os.kill(os.getpid(), signal.SIGINT)
    return YES


def return_a_number(payload: Payload, text: str) -> Any:
    return 1.0


def score_nan(payload: Payload, text: str) -> Verdict:
    return Verdict(float("nan"), Status.GRADED)


def garble(payload: Payload, text: str) -> Verdict:
    """Write to every open file descriptor, the pool's own among them."""
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, b"\x00\x00\x00\x02{]")
    return YES


def start_child(payload: Payload, text: str) -> Verdict:
    child = subprocess.Popen(["sleep", "3600"])
    Path(payload["file"]).write_text(str(child.pid))
    time.sleep(3600)
    return YES


def report_pid(payload: Payload, text: str) -> Verdict:
    return Verdict(1.0, Status.GRADED, str(os.getpid()))


def report_modules(payload: Payload, text: str) -> Verdict:
    return Verdict(1.0, Status.GRADED, " ".join(sorted({"torch", "gppo_megatron"} & set(sys.modules))))


VERIFIERS = {
    "compare": compare,
    "sleep": sleep,
    "nap": nap,
    "pow": power,
    "exit": leave,
    "system_exit": system_exit,
    "segfault": segfault,
    "raise": fail,
    "memory": eat_memory,
    "pollute": pollute,
    "interrupt": interrupt,
    "nonsense": return_a_number,
    "nan": score_nan,
    "garble": garble,
    "child": start_child,
    "pid": report_pid,
    "modules": report_modules,
}
NOT_A_TABLE = 7
