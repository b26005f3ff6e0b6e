"""RunConfig.rollout -> the engine that samples and the way weights reach it; a part of `build`."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import torch

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.rollouts import EmbeddedRollout, SglangRollout, VllmRollout
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.data.model_folder import ModelFolder
from gppo_megatron.errors import ConfigError, SyncError
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.policy.api import WeightSync
from gppo_megatron.rollout.directory import workers_of
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.rollout.engine import Engine, Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.fleet import Fleet, Patience
from gppo_megatron.rollout.over_http import OverHttp, is_router
from gppo_megatron.rollout.probe import PolicyGap, Probe
from gppo_megatron.rollout.server import RefusedError, ServerError
from gppo_megatron.rollout.sglang import SglangServer
from gppo_megatron.rollout.vllm import VllmServer
from gppo_megatron.rollout.workers import Beginning
from gppo_megatron.types import Team
from gppo_megatron.weight_sync.disk import Disk
from gppo_megatron.weight_sync.distributed import Broadcast
from gppo_megatron.weight_sync.in_process import InProcess
from gppo_megatron.weight_sync.servers import ToServers, Transport
from gppo_megatron.weight_sync.tensor import InBody

CONNECT_SECONDS = 10.0
PROBE_TOKENS = 16
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Rollouts:
    """What samples, how it gets its weights, and what adds its faults to a step's metrics.

    beginning: the engine, where it can sample while training goes on.
    """

    engine: Engine
    sync: WeightSync
    reports: "tuple[Reporting, ...]" = ()
    beginning: Beginning | None = None
    probes: "Probes | None" = None

    def checked(self, gap: PolicyGap) -> WeightSync:
        """The same way for the weights, whose arrival the policy's log-probs show where checksums cannot."""
        return self.sync if self.probes is None else replace(self.probes.sync, probe=self.probes.probe(gap))


@dataclass(frozen=True)
class Probes:
    """What a probe of the servers takes but for the policy."""

    sync: ToServers
    servers: "Sequence[SglangServer | VllmServer]"
    loop: EventLoop
    world: Team
    sampling: Sampling
    tolerance: float

    def probe(self, gap: PolicyGap) -> Probe:
        request = Request(gap.prompt.token_ids, self.sampling, 0)
        return Probe(self.servers, self.loop, self.world, request, gap, self.tolerance)


@dataclass(frozen=True)
class Reporting:
    """An `Action` of the loop: the fleet's faults since the last step."""

    fleet: Fleet

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        self.fleet.take_metrics(metrics)


@contextmanager
def open_rollouts(
    config: RunConfig, model_folder: ModelFolder, dtype: torch.dtype, device: torch.device, world: Team
) -> Iterator[Rollouts]:
    """Collective: the run's engine, until the block ends."""
    match config.rollout:
        case EmbeddedRollout(cache_tokens=cache_tokens):
            engine = EmbeddedEngine(model_folder.path, dtype, device, cache_tokens)
            yield Rollouts(engine, InProcess(engine))
        case SglangRollout() | VllmRollout() as rollout:
            make = maker_of(rollout, model_folder.architecture)
            with (
                EventLoop() as loop,
                clients(make, located(rollout, loop, world), rollout.stall_seconds, loop) as servers,
            ):
                if world.rank == 0:
                    loop.run(until_up(servers, rollout.recovery_seconds))
                fleet, sync = served(config, rollout, model_folder, device, world, loop, servers)
                replayed = config.objective.routing == "replayed"
                sampling = Sampling(
                    rollout.temperature, min(PROBE_TOKENS, rollout.max_new_tokens), frozenset(), 0, replayed
                )
                tolerance = rollout.probe_tolerance or PROBE_TOLERANCE[dtype]
                probes = Probes(sync, servers, loop, world, sampling, tolerance)
                try:
                    yield Rollouts(fleet, sync, (Reporting(fleet),), fleet, probes)
                finally:
                    if world.rank == 0:
                        sync.transport.close(servers)


@dataclass(frozen=True)
class Running:
    """Servers that hold one model. weights: what tells it from others."""

    fleet: Fleet
    weights: dict[str, str]


@contextmanager
def open_running(urls: Sequence[str], vocab: int, context: int) -> Iterator[Running]:
    """Servers as they are, their weights left alone. Raises SyncError where they cannot be asked, or differ."""
    with EventLoop() as loop, clients(SglangServer, urls, SglangRollout.stall_seconds, loop) as servers:
        held = {server.url: loop.run(described(server)) for server in servers}
        first, *others = held.items()
        for url, weights in others:
            if weights != first[1]:
                raise SyncError(f"{url} and {first[0]} hold different weights; evaluate them one by one")
        name = first[1]["name"]
        fleet = Fleet(servers, loop, lambda given: 0 if given == name else None, vocab, context, Patience())
        fleet.admit(0, {})
        yield Running(fleet, first[1])


async def described(server: SglangServer) -> dict[str, str]:
    """A server's name of its weights, and their checksums. Raises SyncError."""
    try:
        name = await server.weights_name()
    except ServerError as error:
        raise SyncError(f"the server cannot be asked: {error}") from error
    try:
        sums = await server.checksums()
    except ServerError:
        sums = None  # older servers have none; the name tells them apart
    return {"name": name, **(sums or {})}


def maker_of(rollout: SglangRollout | VllmRollout, model: Architecture) -> Any:
    """Address and client -> a server."""
    match rollout:
        case SglangRollout():
            return partial(SglangServer, model=model)
        case VllmRollout():
            return partial(VllmServer, vocab=model.vocab)


def located(rollout: SglangRollout | VllmRollout, loop: EventLoop, world: Team) -> tuple[str, ...]:
    """Collective: the addresses of the run's servers. Raises what `workers_of` does."""

    async def listed(router: str) -> tuple[str, ...]:
        async with httpx.AsyncClient(timeout=CONNECT_SECONDS) as client:
            return await workers_of(OverHttp(router.rstrip("/"), client), rollout.recovery_seconds)

    if rollout.router is None:
        return rollout.addresses
    addresses: tuple[str, ...] = world.gather(loop.run(listed(rollout.router)) if world.rank == 0 else ())[0]
    return addresses


@contextmanager
def clients(make: Any, urls: Sequence[str], stall_seconds: float, loop: EventLoop) -> Iterator[list[Any]]:
    """Servers of one kind, with one connection pool to all of them."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(stall_seconds, connect=CONNECT_SECONDS, pool=None)
    client = httpx.AsyncClient(timeout=timeout, limits=limits)
    try:
        yield [make(url.rstrip("/"), client) for url in urls]
    finally:
        loop.run(client.aclose())


async def until_up(servers: Sequence[SglangServer | VllmServer], seconds: float) -> None:
    """Wait until all servers answer, so long at most; those that do not are left out at the first publishing.

    Raises SyncError where none answers, and ConfigError for a router: weights must reach each of its workers.
    """
    deadline = time.monotonic() + seconds
    up = 0
    for server in servers:
        while not (answered := await answers(server)) and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        up += answered
        if await is_router(OverHttp(server.url, server.client)):
            raise ConfigError(
                f"rollout.urls: {server.url} is a router, but weights must reach each of its workers; "
                "set rollout.router to it instead, or list them"
            )
    if not up:
        urls = ", ".join(server.url for server in servers)
        raise SyncError(f"rollout.urls: no server answered within {seconds:g} s at {urls}; start them, or correct it")


async def answers(server: SglangServer | VllmServer) -> bool:
    try:
        await server.weights_name()
    except RefusedError:
        pass  # it is up
    except ServerError:
        return False
    return True


def served(
    config: RunConfig,
    rollout: SglangRollout | VllmRollout,
    model_folder: ModelFolder,
    device: torch.device,
    world: Team,
    loop: EventLoop,
    servers: Sequence[SglangServer | VllmServer],
) -> tuple[Fleet, ToServers]:
    """Collective: the servers as one engine, and the way their weights take."""
    transport = transport_of(config, rollout, model_folder, device, loop)
    vocab = model_folder.architecture.vocab
    name = world.gather(f"{Path(config.run).name}-{uuid4().hex[:8]}")[0]
    patience = Patience(requests=rollout.requests, recovery_seconds=rollout.recovery_seconds)
    fleet = Fleet(
        servers,
        loop,
        lambda weights: sync.version_of(weights),
        vocab,
        rollout.context,
        patience,
    )
    sync = ToServers(servers, transport, loop, world, name, fleet.admit, fleet.expect)
    return fleet, sync


def transport_of(
    config: RunConfig,
    rollout: SglangRollout | VllmRollout,
    model_folder: ModelFolder,
    device: torch.device,
    loop: EventLoop,
) -> Transport:
    match rollout:
        case SglangRollout(sync="distributed"):
            backend = "nccl" if device.type == "cuda" else "gloo"
            return Broadcast(rollout.address, backend, device, loop, rollout.stall_seconds)
        case SglangRollout(sync="tensor"):
            return InBody(loop)
        case _:
            return Disk(Path(os.path.abspath(config.run)) / "weights", model_folder.path, loop)
