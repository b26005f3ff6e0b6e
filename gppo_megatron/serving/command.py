"""What `gppo serve-embedded` runs."""

import socket
from collections.abc import Sequence
from pathlib import Path

import torch
import uvicorn

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.errors import ConfigError
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.serving.app import serving
from gppo_megatron.serving.faults import Fault, Faulty
from gppo_megatron.serving.sampler import Sampler
from gppo_megatron.serving.weights import WeightUpdates, read_folder

CACHE_TOKENS = 65_536


def serve(folder: Path, host: str, port: int, dtype: torch.dtype, context: int | None, faults: Sequence[Fault]) -> None:
    """Serve the model in `folder` until a signal comes; port 0 takes a free one, and the address is printed.

    context: most tokens of a prompt and its response; by default the model's own. faults: what it does wrong.
    Raises ConfigError, and CheckpointError for a folder whose weights cannot be read.
    """
    torch.set_num_threads(1)
    architecture = read_architecture(folder)
    HfReader(folder)  # says what is wrong with the files, if anything is
    context = context or architecture.max_positions
    engine = EmbeddedEngine(folder, dtype, torch.device("cpu"), cache_tokens=max(CACHE_TOKENS, context))
    known = {name for name, _ in engine.parameters()}
    engine.load(0, ((name, tensor) for name, tensor in read_folder(folder).items() if name in known))
    sampler = Sampler(engine, context)
    app = Faulty(serving(sampler, WeightUpdates(sampler), architecture.vocab, str(folder)), sampler, faults)
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --port") from error
    with listening:
        print(f"serving {folder} at http://{host}:{listening.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
