"""The embedded engine behind its HTTP server, in a thread of the test's process."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn

from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.serving.app import serving
from gppo_megatron.serving.faults import Faulty, read_fault
from gppo_megatron.serving.sampler import Sampler
from gppo_megatron.serving.weights import WeightUpdates

VOCAB, CONTEXT = 21, 64


@contextmanager
def served(folder: Path, *faults: str, tokens_a_piece: int = 4) -> Iterator[str]:
    """The URL of a server of the model in `folder`, which holds no weights yet."""
    with mendable(folder, *faults, tokens_a_piece=tokens_a_piece) as (url, _):
        yield url


@contextmanager
def mendable(folder: Path, *faults: str, tokens_a_piece: int = 4) -> Iterator[tuple[str, Callable[[], None]]]:
    """The URL of a server, as `served`, and what ends its faults."""
    engine = EmbeddedEngine(folder, torch.float32, torch.device("cpu"), cache_tokens=4096)
    sampler = Sampler(engine, CONTEXT, tokens_a_piece)
    app = Faulty(serving(sampler, WeightUpdates(sampler), VOCAB, str(folder)), sampler, map(read_fault, faults))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app.mend
    finally:
        server.should_exit = True
        thread.join()


@dataclass(frozen=True)
class Serving:
    """A server's address and its process."""

    url: str
    process: "subprocess.Popen[str]"


@contextmanager
def serving_process(folder: Path, *faults: str) -> Iterator[Serving]:
    """`gppo serve-embedded` in a process of its own."""
    command = [sys.executable, "-m", "gppo_megatron", "serve-embedded", str(folder), "--port", "0"]
    command += ["--context", str(CONTEXT), *(f"--fault={fault}" for fault in faults)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " at http://" in line, line
            yield Serving(line.split(" at ")[1].strip(), process)
        finally:
            process.terminate()
