"""What a run must hold besides the policy to go on as if it had never stopped; as JSON, which runs nothing when read.

A checkpoint folder holds, beside the policy's shards:
    train_state.json       where the run stands, the same for every process
    random/rank-N.json     the random number generators of each process
"""

import base64
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from gppo_megatron.errors import CheckpointError

TRAIN_STATE, RANDOM = "train_state.json", "random"
FORMAT = 1


class Resumable(Protocol):
    """Has a state of its own that a checkpoint holds: values that JSON has a word for."""

    def state(self) -> Mapping[str, Any]:
        """What `restore` needs to go on from here; the same on every process."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises CheckpointError for one it cannot have."""
        ...


@dataclass(frozen=True)
class TrainState:
    """Where a run stands between two steps.

    stage: "warmup" or "train". step: how many steps of it are done. total: those of all stages. processes: how many
    there were. metrics_bytes: length of metrics.jsonl. rollouts: the state of the rollout source: its place in the
    data, and whatever it has sampled ahead.
    """

    stage: str
    step: int
    total: int
    processes: int
    metrics_bytes: int
    rollouts: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        (folder / TRAIN_STATE).write_text(text + "\n", encoding="utf-8")


def read_train_state(folder: Path) -> TrainState:
    """Raises CheckpointError where the folder holds none, or one of another version."""
    file = folder / TRAIN_STATE
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        if held.pop("format") != FORMAT:
            raise CheckpointError(f"{file} is not of format {FORMAT}, the one this version reads")
        return TrainState(**held)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds weights, but no {TRAIN_STATE}: no run can go on from it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged ({error!r})") from error


def seed_generators(seed: int) -> None:
    """Begin every generator of this process at `seed`, also those that only libraries might draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.manual_seed(seed)


def write_random_state(folder: Path, rank: int) -> None:
    """Keep this process's generators: Python's, numpy's, torch's, and the GPU's where there is one."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the generator that libraries share
    state = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }
    target = folder / RANDOM
    target.mkdir(exist_ok=True)
    (target / f"rank-{rank}.json").write_text(json.dumps(state), encoding="utf-8")


def restore_random_state(folder: Path, rank: int) -> None:
    """Set this process's generators to what `write_random_state` kept. Raises CheckpointError."""
    file = folder / RANDOM / f"rank-{rank}.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        version, keys, gauss = state["python"]
        random.setstate((version, tuple(keys), gauss))
        kind, numbers, *rest = state["numpy"]
        np.random.set_state((kind, np.array(numbers, dtype=np.uint32), *rest))  # noqa: NPY002
        torch.set_rng_state(_tensor(state["torch"]))
        if torch.cuda.is_available() and state["cuda"] is not None:
            torch.cuda.set_rng_state(_tensor(state["cuda"]))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{file} is missing or damaged ({error!r})") from error


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
