"""Runs of `gppo train`, each in forked processes, some of them killed at a chosen point; imports are paid for once.

usage: attempts.py FILE, a JSON list of {"arguments": [...], "ranks": n, "kill": null or [point, count, signal]}
Prints the exit status of every attempt, as a JSON list; -9 where it was killed by SIGKILL.
"""

import functools
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

import gppo_megatron.build  # noqa: F401 - what takes long to import
import gppo_megatron.checkpoint.folder as checkpoint_folder
from gppo_megatron.cli import main
from gppo_megatron.data.prompts import PromptStream
from gppo_megatron.observe.record import Record
from gppo_megatron.policy.megatron.save import SaveHf
from gppo_megatron.policy.megatron.update import MegatronPolicy
from gppo_megatron.rollout.collect import Collector
from gppo_megatron.rollout.source import GivenAnswers
from gppo_megatron.weight_sync.in_process import InProcess

POINTS: dict[str, tuple[Any, str]] = {
    "warm-up": (GivenAnswers, "next_groups"),
    "rollout": (Collector, "collect"),
    "update": (MegatronPolicy, "update"),
    "publish": (InProcess, "publish"),
    "record": (Record, "__call__"),  # the step is measured, and not yet saved
    "shards": (filesystem_async, "_write_item"),  # in the middle of a file, in a forked writer
    "manifest": (checkpoint_folder, "_publish"),  # all is written, and not yet there
    "prune": (checkpoint_folder, "_prune"),  # it is there, and the older ones as well
    "epoch": (PromptStream, "restore"),
    "export": (SaveHf, "write"),
}


def kill_at(point: str, count: int, number: int) -> None:
    """Have this process get the signal `number` when `point` is passed for the `count`-th time."""
    owner, name = POINTS[point]
    original: Callable[..., Any] = getattr(owner, name)
    rank, passed = os.getpid(), 0

    @functools.wraps(original)  # Megatron-Core looks at its signature
    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal passed
        passed += 1
        result = original(*arguments, **options) if point == "record" else None
        if passed == count:
            os.kill(rank, number)
            if os.getpid() != rank:
                os._exit(1)  # a writer that was forked from it
        return result if point == "record" else original(*arguments, **options)

    setattr(owner, name, dying)


def note_prompts(file: Path) -> None:
    """Have every optimizer step's prompts noted: a line of stage and ids."""
    original = PromptStream.take

    def take(self: PromptStream, count: int) -> Any:
        before = self.state()
        prompts = original(self, count)
        with file.open("a") as lines:
            lines.write(json.dumps([before.epoch, before.offset, *(prompt.id for prompt in prompts)]) + "\n")
        return prompts

    PromptStream.take = take  # type: ignore[method-assign]


def run(rank: int, attempt: dict[str, Any], port: int) -> None:
    """Never returns."""
    status = 99
    try:
        if attempt["ranks"] > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(attempt["ranks"])}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if attempt["kill"]:
            kill_at(*attempt["kill"])
        if rank == 0 and "prompts" in attempt:
            note_prompts(Path(attempt["prompts"]))
        status = main(["train", *attempt["arguments"]])
    finally:
        if status == 99:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def attempt_of(attempt: dict[str, Any]) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = {}
    for rank in range(attempt["ranks"]):
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)  # stdout is for the statuses
            run(rank, attempt, port)
        children[child] = rank
    worst = 0
    while children:
        child, encoded = os.wait()
        del children[child]
        status = os.waitstatus_to_exitcode(encoded)
        if status and not worst:
            worst = status
            for other in children:
                os.kill(other, signal.SIGKILL)
    return worst


if __name__ == "__main__":
    attempts = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([attempt_of(attempt) for attempt in attempts]))
