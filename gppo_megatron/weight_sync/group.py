"""A process group of the trainer and its rollout servers, which are no members of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper

Group = dist.ProcessGroup


@contextmanager
def process_group(
    address: str, port: int, rank: int, size: int, name: str, backend: str, timeout_seconds: float
) -> Iterator[Group]:
    """Collective: meet the others at address:port, where rank 0 listens; no wait, here or later, outlasts the timeout.

    SGLang joins such a group by `/init_weights_update_group`: keys under the group's name in one TCP store.
    Raises RuntimeError where they do not all come.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]
        backend_options=None,
        timeout=timeout,
        device_id=None,
    )
    try:
        yield group
    finally:
        group.shutdown()


def broadcast(tensor: torch.Tensor, group: Group) -> None:
    """Collective: rank 0's bytes to every member. Raises RuntimeError where one is lost, or too late."""
    group.broadcast(tensor, 0).wait()
