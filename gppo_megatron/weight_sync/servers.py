"""Weights for rollout servers of other processes: sent by one way or another, and checked tensor by tensor after."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from gppo_megatron.errors import SyncError
from gppo_megatron.fused_checksums import FusedChecksums
from gppo_megatron.types import Described, Meeting, Team

NamedTensors = Iterator[tuple[str, torch.Tensor]]
Faults = Mapping[str, str]
"""A server's URL -> why it does not hold the weights it should."""


class WeightServer(Protocol):
    """A server that takes weights. Each method raises an exception of type `failure` with the server's reason."""

    @property
    def url(self) -> str: ...

    @property
    def failure(self) -> type[Exception]: ...

    async def weights_name(self) -> str: ...
    async def pause(self) -> None:
        """Hold all responses under way; they go on, from their tokens alone, after `go_on`."""
        ...

    async def go_on(self) -> None: ...
    async def load_folder(self, folder: str, name: str) -> None: ...
    async def begin_update(self) -> None: ...
    async def end_update(self) -> None: ...
    async def load_tensors(self, pickled: bytes, name: str) -> None: ...
    async def join(self, meeting: Meeting, rank: int) -> None: ...
    async def leave(self, group: str) -> None: ...
    async def receive(self, tensors: Sequence[Described], group: str, name: str) -> None: ...

    async def checksums(self) -> Mapping[str, str]:
        """`fused_checksums` of what it holds; those of some tensors, or of none, where it cannot tell the others'."""
        ...


class Waits(Protocol):
    """Runs asynchronous work to its end, from plain code."""

    def run(self, work: Any) -> Any: ...


class Transport(Protocol):
    """One way to carry weights."""

    def send(self, servers: Sequence[WeightServer], name: str, tensors: NamedTensors) -> Faults:
        """Hand every tensor to every server, as the weights `name`. Consumes `tensors` to the end, unless it raises."""
        ...

    def close(self, servers: Sequence[WeightServer]) -> None:
        """Give up whatever is held between two sends."""
        ...


@dataclass(frozen=True)
class ToServers:
    """A WeightSync. run: names this run among others that may have used the servers.

    admit: told on every process which servers do not hold the version. expect: told before any server can hold it.
    probe: collective, asked of servers that hold tensors whose checksums they cannot tell; says which of them does not
        sample as the policy does, or nothing.
    """

    servers: Sequence[WeightServer]
    transport: Transport
    waits: Waits
    world: Team
    run: str
    admit: Callable[[int, Faults], None]
    expect: Callable[[int], None] = lambda version: None
    probe: Callable[[Sequence[str]], str] = lambda urls: ""

    def publish(self, version: int, weights: Callable[[], NamedTensors]) -> None:
        """Collective: every server that can be reached holds `version` afterwards, as checksums or a probe show.

        Raises SyncError, on every process, where none does, or where one holds anything else.
        """
        self.expect(version)
        lost: dict[str, str] = {}
        servers = self.servers
        for last in (False, True):
            outcome: _Outcome = self.world.gather(self._attempt(servers, version, weights))[0]
            if outcome.wrong:
                self._refuse(version, outcome.wrong)
            if last or not outcome.again:
                break
            lost |= {url: fault for url, fault in outcome.faults.items() if url not in outcome.again}
            servers = [server for server in servers if server.url in outcome.again]
        self.admit(version, lost | dict(outcome.faults))
        if outcome.untold and (wrong := self.probe(outcome.untold)):
            self._refuse(version, wrong + outcome.suspects)

    def _refuse(self, version: int, wrong: str) -> None:
        """Raises SyncError. No server may serve any more."""
        with suppress(SyncError):
            self.admit(version, {server.url: wrong for server in self.servers})
        raise SyncError(wrong)

    def version_of(self, name: str) -> int | None:
        """The version in a name that this run gave; None for any other name."""
        run, _, version = name.rpartition(".")
        return int(version) if run == self.run and version.isdecimal() else None

    def _attempt(
        self, servers: Sequence[WeightServer], version: int, weights: Callable[[], NamedTensors]
    ) -> "_Outcome":
        tensors = weights()
        if self.world.rank != 0:
            for _ in tensors:
                pass
            return _Outcome()
        name = f"{self.run}.{version}"
        sums = FusedChecksums()
        try:
            self.waits.run(on_all(servers, lambda server: server.pause()))
            faults = dict(self.transport.send(servers, name, _summed(tensors, sums)))
            reached = [server for server in servers if server.url not in faults]
            faults |= self.waits.run(on_all(reached, lambda server: server.go_on()))
            held = self.waits.run(_held([server for server in reached if server.url not in faults]))
            wrong = _difference(held, name, sums.finished())
        except (SyncError, ValueError) as error:
            for _ in tensors:  # the other processes walk through them too
                pass
            return _Outcome(wrong=str(error))
        if wrong:
            return _Outcome(wrong=wrong)
        # A group breaks for all its members when one is lost: those that still answer get another attempt.
        again = self._alive(servers) if servers and len(faults) == len(servers) else ()
        untold = [(url, set(sums.finished()) - set(checksums)) for url, (_, checksums) in held.items()]
        return _Outcome(
            faults,
            again,
            untold=tuple(url for url, names in untold if names),
            suspects=_suspects(set().union(*(names for _, names in untold)), sums.finished()),
        )

    def _alive(self, servers: Sequence[WeightServer]) -> tuple[str, ...]:
        lost = self.waits.run(on_all(servers, lambda server: server.weights_name()))
        return tuple(server.url for server in servers if server.url not in lost)


@dataclass(frozen=True)
class _Outcome:
    """Of one attempt, as the first process saw it.

    wrong: why the run must end. again: servers to try once more. untold: those that cannot tell the checksums of all
    tensors; suspects: which tensors these are, in words.
    """

    faults: Faults = field(default_factory=dict)
    again: tuple[str, ...] = ()
    wrong: str = ""
    untold: tuple[str, ...] = ()
    suspects: str = ""


async def on_all(servers: Sequence[WeightServer], act: Callable[[WeightServer], Any]) -> dict[str, str]:
    """Do one thing with all servers at once; the faults of those where it failed."""

    async def attempt(server: WeightServer) -> str | None:
        try:
            await act(server)
        except server.failure as error:
            return str(error)
        return None

    faults = await asyncio.gather(*(attempt(server) for server in servers))
    return {server.url: fault for server, fault in zip(servers, faults, strict=True) if fault is not None}


def _summed(tensors: NamedTensors, sums: FusedChecksums) -> NamedTensors:
    for name, tensor in tensors:
        sums.add(name, tensor)
        yield name, tensor


async def _held(servers: Sequence[WeightServer]) -> dict[str, tuple[str, Mapping[str, str]]]:
    """What those servers that answer call their weights, and the checksums they can tell, by URL."""
    held = {}
    for server in servers:
        # One that does not answer shows it at its next request, and the fleet leaves it out.
        with suppress(server.failure):
            held[server.url] = (await server.weights_name(), await server.checksums())
    return held


def _difference(held: Mapping[str, tuple[str, Mapping[str, str]]], name: str, sent: Mapping[str, str]) -> str:
    """Which tensor of which server is not what was sent; empty where all are."""
    for url, (held_name, checksums) in held.items():
        if held_name != name:
            return f"{url} calls its weights {held_name!r} after {name!r} was sent"
        wrong = [tensor for tensor in sorted(checksums) if checksums[tensor] != sent.get(tensor)]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            return (
                f"{url} does not hold {wrong[0]}{more} as it was sent with the weights {name}; "
                "it needs the trainer's dtype (--dtype) and an unquantised, untied-as-here model"
            )
    return ""


def _suspects(untold: Set[str], sent: Mapping[str, str]) -> str:
    """Which tensors a wrong server may hold wrongly, as far as the others' checksums tell."""
    if not untold or len(untold) == len(sent):
        return ""
    others = f"one of the {len(untold)} tensors whose checksums it does not tell; the others are as sent"
    if "lm_head.weight" in sent or "model.embed_tokens.weight" in untold:
        return f". Wrong is {others}"
    return f". Wrong is lm_head.weight, tied to model.embed_tokens.weight here but a copy of its own there, or {others}"
