"""The policy in Megatron-Core's distributed format: each process writes its shards, any layout reads them.

A checkpoint holds weights and optimizer state by global name and place, so that tensor, pipeline and data parallelism
may differ between writing and reading.
"""

import os
import pickle
import queue
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from torch.distributed.checkpoint.api import CheckpointException

from gppo_megatron.checkpoint.metadata import check
from gppo_megatron.errors import CheckpointError
from gppo_megatron.parent_death import forks_end_with_their_parent
from gppo_megatron.policy.megatron.optimizer_state import RESHARDABLE

FORMAT = {"gppo_state": 3}
"""Noted in a checkpoint: which keys a run that goes on from it will find."""
CONTENT = RESHARDABLE | FORMAT

EXTRA_STATE = "_extra_state"
"""What Transformer Engine's modules keep beside their weights: the scales of FP8, and otherwise nothing."""

ShardedState = dict[str, Any]
"""Nested dicts whose leaves are Megatron's descriptions of shards, or plain values that are equal on every process."""


class WriteResults:
    """Carries what a forked writer wrote back to the process that forked it, through a file without a name.

    Stands for the queue that Megatron-Core would start a further process for: one that imports everything anew, and
    that stays behind where a run is killed.
    """

    def __init__(self) -> None:
        self._descriptor, path = tempfile.mkstemp()
        os.unlink(path)

    def put(self, value: object) -> None:
        content = pickle.dumps(value)
        os.ftruncate(self._descriptor, 0)
        written = 0
        while written < len(content):
            written += os.pwrite(self._descriptor, content[written:], written)

    def get_nowait(self) -> Any:
        """The last value put; raises queue.Empty where there is none."""
        size = os.fstat(self._descriptor).st_size
        if not size:
            raise queue.Empty
        value = pickle.loads(os.pread(self._descriptor, size, 0))
        os.ftruncate(self._descriptor, 0)
        return value


def weights_state(chunks: list[DistributedDataParallel]) -> ShardedState:
    """This process's part of the weights, whatever modules the layers are made of."""
    parts = {f"model{place}": _with_data(chunk.module) for place, chunk in enumerate(chunks)}
    return {"model": parts.pop("model0"), **parts}


def _with_data(module: Any) -> ShardedState:
    state: ShardedState = module.sharded_state_dict(metadata=dict(RESHARDABLE))
    scaled = module.config.fp8 is not None
    return {
        name: part
        for name, part in state.items()
        if not isinstance(part, ShardedObject) or (scaled and part.data is not None)
    }


def load_weights(chunks: list[DistributedDataParallel], read: Mapping[str, Any]) -> None:
    """Put what `read_shards` gave for `weights_state` into the model. Raises CheckpointError for NaN or infinity."""
    for place, chunk in enumerate(chunks):
        part = read["model" if place == 0 else f"model{place}"]
        kept = {name: value for name, value in chunk.module.state_dict().items() if name.endswith(EXTRA_STATE)}
        chunk.module.load_state_dict(kept | part, strict=True)
        damaged = [name for name, value in chunk.module.named_parameters() if not value.isfinite().all()]
        if damaged:
            raise CheckpointError(
                f"NaN or infinity in the checkpoint's {', '.join(damaged[:5])}; the weights are damaged"
            )


def write_shards(folder: Path, state: ShardedState, asynchronous: bool) -> AsyncCallsQueue | None:
    """Collective: write every process's shards into `folder`, which exists.

    asynchronous: forked processes write, while this one goes on; the returned queue's `maybe_finalize_async_calls`
    completes the folder. What is written is the state as it was at this call.
    """
    if not isinstance(filesystem_async._results_queue, WriteResults):
        filesystem_async._results_queue = WriteResults()
        forks_end_with_their_parent()  # a writer that outlives its run would hold the run's folder for ever
    if not asynchronous:
        try:
            dist_checkpointing.save(state, str(folder), content_metadata=dict(CONTENT))
        except (CheckpointException, CheckpointingException) as error:
            raise CheckpointError(f"{folder} cannot be written: {_reason(error)}") from error
        return None
    request = dist_checkpointing.save(state, str(folder), content_metadata=dict(CONTENT), async_sharded_save=True)
    calls = AsyncCallsQueue(persistent=False)
    calls.schedule_async_request(request)
    return calls


def complete(calls: AsyncCallsQueue, wait: bool) -> bool:
    """Collective: whether all that `write_shards` began is on the disk; then the folder is complete.

    Raises CheckpointError where a process could not write.
    """
    try:
        done = bool(calls.maybe_finalize_async_calls(blocking=wait))
    except (CheckpointException, CheckpointingException) as error:
        raise CheckpointError(f"a checkpoint cannot be written: {_reason(error)}") from error
    if done:
        calls.close()
    return done


def _reason(error: BaseException) -> str:
    """Torch's own text is a traceback; the reasons lie inside, one a rank."""
    failures = error.failures.items() if isinstance(error, CheckpointException) else ()
    return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in failures) or str(error)


def read_shards(folder: Path, state: ShardedState, every: bool) -> ShardedState:
    """Collective: what `state` describes, read from `folder`. every: refuse a folder that holds more than that.

    Raises CheckpointError where anything is missing, of another shape, or not safe to read.
    """
    check(folder)
    if every:
        _check_format(folder)
    strict = StrictHandling.RAISE_ALL if every else StrictHandling.RETURN_ALL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Megatron-Core uses what torch means to drop
            read = dist_checkpointing.load(state, str(folder), strict=strict)
    except (CheckpointingException, CheckpointException, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder} does not fit this run: {_reason(error)}") from error
    if every:
        return read  # type: ignore[no-any-return]
    found, _, absent = read
    if absent:
        raise CheckpointError(f"{folder} lacks {', '.join(sorted(absent)[:5])}; it is of another model")
    return found  # type: ignore[no-any-return]


def _check_format(folder: Path) -> None:
    noted = dist_checkpointing.load_content_metadata(str(folder)) or {}
    if any(noted.get(key) != value for key, value in FORMAT.items()):
        raise CheckpointError(
            f"{folder} was not written by this version of gppo_megatron, so a run cannot go on from it; `gppo convert` "
            "makes a model folder of its weights, from which a new run can begin (model.path)"
        )
