"""Weights by broadcast: NCCL between GPUs, gloo between CPUs."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from uuid import uuid4

import torch

from gppo_megatron.types import Described, Meeting
from gppo_megatron.weight_sync.buckets import Bucket, buckets
from gppo_megatron.weight_sync.group import Group, broadcast, process_group
from gppo_megatron.weight_sync.servers import Faults, NamedTensors, Waits, WeightServer, on_all


class Broadcast:
    """A Transport: the trainer's first process and the servers form a group, in which tensors travel in flat buckets.

    address: of this process, as servers reach it. backend: "nccl" or "gloo".
    timeout_seconds: no broadcast waits longer for a server; then the group is given up and formed anew.
    """

    def __init__(
        self,
        address: str,
        backend: str,
        device: torch.device,
        waits: Waits,
        timeout_seconds: float,
        bucket_bytes: int = 2**28,
    ) -> None:
        self._address, self._backend, self._device = address, backend, device
        self._waits = waits
        self._timeout_seconds = timeout_seconds
        self._bucket_bytes = bucket_bytes
        self._members: tuple[str, ...] = ()
        self._group: Group | None = None
        self._name = ""
        self._open = ExitStack()

    def send(self, servers: Sequence[WeightServer], name: str, tensors: NamedTensors) -> Faults:
        """See `Transport.send`. One server that is lost in the middle fails them all; the next send leaves it out."""
        if not servers:
            for _ in tensors:
                pass
            return {}
        faults = self._form(servers) or self._waits.run(on_all(servers, lambda server: server.begin_update()))
        for bucket in buckets(tensors, self._bucket_bytes):
            if not faults:
                faults = self._broadcast(servers, bucket, name)
        faults = faults or self._waits.run(on_all(servers, lambda server: server.end_update()))
        if faults:
            self._disband(servers)
            return dict.fromkeys((server.url for server in servers), "; ".join(faults.values())) | faults
        return {}

    def close(self, servers: Sequence[WeightServer]) -> None:
        self._disband(servers)

    def _form(self, servers: Sequence[WeightServer]) -> dict[str, str]:
        """Meet the servers, unless the group is theirs already."""
        urls = tuple(server.url for server in servers)
        if self._group is not None and urls == self._members:
            return {}
        self._disband(servers)
        meeting = Meeting(self._address, free_port(), 1 + len(servers), f"gppo-{uuid4().hex[:8]}", self._backend)

        async def all_meet() -> dict[str, str]:
            ranks = {server.url: rank for rank, server in enumerate(servers, 1)}
            joining = asyncio.create_task(on_all(servers, lambda server: server.join(meeting, ranks[server.url])))
            own = process_group(
                meeting.address, meeting.port, 0, meeting.size, meeting.name, meeting.backend, self._timeout_seconds
            )
            try:
                self._group = await asyncio.to_thread(self._open.enter_context, own)
            except RuntimeError as error:
                joining.cancel()
                return dict.fromkeys(urls, f"the group did not meet at {meeting.address}:{meeting.port}: {error}")
            return await joining

        faults: dict[str, str] = self._waits.run(all_meet())
        self._members, self._name = urls, meeting.name
        return faults

    def _broadcast(self, servers: Sequence[WeightServer], bucket: Bucket, name: str) -> dict[str, str]:
        """Announce a bucket, and send its bytes while the servers wait for them."""
        described = [Described(each, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for each, t in bucket]
        flat = torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for _, tensor in bucket])

        async def both() -> dict[str, str]:
            announced = asyncio.create_task(on_all(servers, lambda s: s.receive(described, self._name, name)))
            assert self._group is not None
            sending = asyncio.create_task(asyncio.to_thread(broadcast, flat.to(self._device), self._group))
            # A server that refuses will never receive: the broadcast must not be waited for.
            done, _ = await asyncio.wait({announced, sending}, return_when=asyncio.FIRST_COMPLETED)
            if announced in done and (faults := announced.result()):
                return faults
            try:
                await sending
            except RuntimeError as error:
                return {server.url: f"the broadcast broke off: {error}" for server in servers} | await announced
            return await announced

        return self._waits.run(both())  # type: ignore[no-any-return]

    def _disband(self, servers: Sequence[WeightServer]) -> None:
        """Leave the group on every side; servers that are gone have left."""
        if self._members:
            members = [server for server in servers if server.url in self._members]
            self._waits.run(on_all(members, lambda server: server.leave(self._name)))
        self._open.close()
        self._members, self._group, self._name = (), None, ""


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
