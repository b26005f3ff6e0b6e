"""How the processes of one start find one another in a store that outlives them.

torchrun keeps its store over restarts. Gloo publishes each process's address in it, so a restarted process would find
those of the dead, and connect to nobody.
"""

import time
import uuid
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

POLL_SECONDS = 0.02
WELCOME = "gppo/welcome"


class Store(Protocol):
    """What of a torch.distributed store is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def fresh_store(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Collective: a part of `store` that holds nothing of an earlier start.

    Every process leaves a token of its own. Rank 0 lists the tokens it finds, again and again, since some may be of
    dead processes; who finds his own in the list says so. Raises RuntimeError where somebody does not come in time.
    """
    token = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(_hello(rank), token)
    while time.monotonic() < deadline:
        start = _lead(store, token, size) if rank == 0 else _follow(store, token, rank)
        if start is not None:
            return dist.PrefixStore(f"gppo/{start}", store)  # type: ignore[attr-defined,arg-type]
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s for the other processes of this run to start")


def _lead(store: Store, token: str, size: int) -> str | None:
    """The name of this start, once every process knows it."""
    if not store.check([_hello(rank) for rank in range(size)]):
        return None
    store.set(WELCOME, " ".join(store.get(_hello(rank)).decode() for rank in range(size)))
    return token if size == 1 or store.check([_known(token, rank) for rank in range(1, size)]) else None


def _follow(store: Store, token: str, rank: int) -> str | None:
    """The name of this start, once rank 0 has listed this process."""
    if not store.check([WELCOME]):
        return None
    start, *others = store.get(WELCOME).decode().split()
    if token not in others:
        return None
    store.set(_known(start, rank), "")
    return start


def _hello(rank: int) -> str:
    return f"gppo/hello/{rank}"


def _known(start: str, rank: int) -> str:
    return f"gppo/known/{start}/{rank}"
