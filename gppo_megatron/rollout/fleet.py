"""Many rollout servers as one engine: each response is sampled to its end, whichever servers fail on the way."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from gppo_megatron.errors import GppoError, SyncError
from gppo_megatron.metrics import StepMetrics, Sum
from gppo_megatron.rollout.engine import Completion, Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.reported import top_tokens
from gppo_megatron.rollout.server import (
    GarbledReplyError,
    RefusedError,
    Sampled,
    Server,
    ServerError,
    ServerLostError,
)


@dataclass(frozen=True)
class Patience:
    """attempts: times one response is begun or taken up again. requests: sent to a server at once, at most.

    recovery_seconds: how long to wait for a server while none is left.
    """

    attempts: int = 8
    requests: int = 256
    recovery_seconds: float = 300.0


@dataclass
class _Response:
    """A response under way: the tokens that servers have sampled so far, kept whatever happens to them.

    oldest: the policy version in use when it began; no token may be older. fault: the last attempt's, with its server.
    vocab: a server asked for more likely tokens than there are would die of it.
    """

    request: Request
    oldest: int
    vocab: int
    fault: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    attempts: int = 0
    top: list[dict[int, float]] = field(default_factory=list)
    experts: NDArray[np.int16] | None = None

    @property
    def rest(self) -> Request:
        """What is still to be sampled."""
        sampling = self.request.sampling
        left = sampling.max_new_tokens - len(self.token_ids)
        likeliest = min(sampling.top_tokens, self.vocab)
        rest = Sampling(sampling.temperature, left, sampling.stop_ids, likeliest, sampling.experts)
        return Request(self.request.prompt_ids + tuple(self.token_ids), rest, self.request.seed)

    @property
    def finish(self) -> str | None:
        """None while there is more to sample."""
        if self.token_ids and self.token_ids[-1] in self.request.sampling.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.sampling.max_new_tokens else None

    def completion(self) -> Completion:
        assert self.finish is not None
        count = self.request.sampling.top_tokens
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int64),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int64),
            finish=self.finish,
            top=top_tokens(self.top, self.token_ids, self.logprobs, count, self.vocab) if count else None,
            experts=self.experts,
        )


class Fleet:
    """An `Engine` of servers. A server serves while it is admitted: while its weights are known to be the policy's.

    version_of: a server's name of its weights -> the policy version; None for weights of any other origin.
    vocab, context: what the model takes; a request beyond them never reaches a server.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        loop: EventLoop,
        version_of: Callable[[str], int | None],
        vocab: int,
        context: int,
        patience: Patience,
    ) -> None:
        if not servers:
            raise ValueError("a fleet needs a server")
        self._servers = {server.url: server for server in servers}
        self._loop = loop
        self._version_of = version_of
        self._vocab, self._context = vocab, context
        self._patience = patience
        self._version = self._newest = -1
        self._places = {server.url: asyncio.Semaphore(patience.requests) for server in servers}
        self._admitted: set[str] = set()
        self._faults = dict.fromkeys(self._servers, "has no weights of this run yet")
        self._counts = {"rollout/retries": 0, "rollout/garbled_replies": 0, "rollout/servers_lost": 0}
        self._family = uuid4().hex[:12]

    @property
    def version(self) -> int:
        """The policy version that admitted servers hold; -1 before the first weights."""
        return self._version

    @property
    def servers(self) -> tuple[Server, ...]:
        return tuple(self._servers.values())

    def expect(self, version: int) -> None:
        """From now on a response that is under way may have tokens of `version`, which is being published."""
        self._newest = max(self._newest, version)

    def admit(self, version: int, faults: Mapping[str, str]) -> None:
        """From now on serve with `version`, by every server but those with a fault (why it does not hold it).

        Raises SyncError where no server is left.
        """
        self._faults = dict(faults)
        self._admitted = set(self._servers) - set(faults)
        self._version = version if self._admitted else -1
        self._newest = self._version
        if not self._admitted:
            raise SyncError(f"no server holds version {version} of the weights: {self._reasons()}")

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `Engine.generate`. Raises GppoError where a response cannot be finished, with every server's fault."""
        self._check(requests)
        return self._loop.run(self._after_readmission(requests))

    def begin(self, batches: Sequence[Sequence[Request]]) -> "list[Future[list[Completion]]]":
        """What `generate` would return for each batch, while the caller does something else.

        Weights may change on the way: see `expect`. Cancelling a future ends its requests.
        """
        for requests in batches:
            self._check(requests)
        readmission = self._loop.start(self._readmit())
        return [self._loop.start(self._generate(requests, readmission)) for requests in batches]

    def take_metrics(self, metrics: StepMetrics) -> None:
        """What went wrong since the last call, as `rollout/...` counts."""
        for name, count in self._counts.items():
            metrics.add(name, Sum(float(count)))
        self._counts = dict.fromkeys(self._counts, 0)

    def _check(self, requests: Sequence[Request]) -> None:
        if self._version < 0:
            raise SyncError("the rollout servers hold no weights of this run; publish the policy's before sampling")
        for request in requests:
            self._check_one(request)

    def _check_one(self, request: Request) -> None:
        ids = request.prompt_ids
        if not ids:
            raise ValueError("a prompt without tokens cannot be continued")
        if not 0 <= min(ids) <= max(ids) < self._vocab:
            raise ValueError(f"prompt {ids[:20]} has a token outside the vocabulary of {self._vocab}")
        total = len(ids) + request.sampling.max_new_tokens
        if total > self._context:
            raise ValueError(
                f"{len(ids)} prompt tokens and {request.sampling.max_new_tokens} new ones are {total}, "
                f"but the context is {self._context}; lower rollout.max_new_tokens"
            )

    async def _after_readmission(self, requests: Sequence[Request]) -> list[Completion]:
        await self._readmit()
        return await self._generate(requests)

    async def _generate(
        self, requests: Sequence[Request], readmission: "Future[None] | None" = None
    ) -> list[Completion]:
        """readmission: to be waited for first, and not to be cancelled: others wait for it too."""
        responses = [_Response(request, self._version, self._vocab) for request in requests]
        if readmission is not None:
            await asyncio.shield(asyncio.wrap_future(readmission))
        family = f"{self._family}-{uuid4().hex[:8]}-"
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, response in enumerate(responses):
                    tasks.create_task(self._finish(response, f"{family}{number}"))
        except* GppoError as errors:
            raise errors.exceptions[0] from None
        finally:
            # What an attempt that failed began may go on without anybody who reads it.
            if any(response.finish is None or response.attempts > 1 for response in responses):
                await self._abort(family)
        return [response.completion() for response in responses]

    async def _finish(self, response: _Response, name: str) -> None:
        """Sample until the response is complete, by as many servers as it takes."""
        for attempt in range(self._patience.attempts):
            server = await self._pick(response.request)
            response.attempts += 1
            async with self._places[server.url]:
                await self._advance(response, server, f"{name}-{attempt}")
            if response.finish is not None:
                return
            self._counts["rollout/retries"] += 1
            await asyncio.sleep(min(0.05 * 2**attempt, 5.0))
        raise GppoError(
            f"a response is not complete after {self._patience.attempts} attempts, with {len(response.token_ids)} "
            f"tokens; at last {response.fault}"
        )

    async def _advance(self, response: _Response, server: Server, name: str) -> None:
        """One attempt by one server; what it sampled is kept, unless it cannot be true."""
        so_far = Sampled()

        def grown(sampled: Sampled) -> None:
            nonlocal so_far
            so_far = sampled

        fault = None
        try:
            so_far = await server.generate(response.rest, name, grown)
        except ServerLostError as error:
            fault = str(error)
        except RefusedError as error:
            raise GppoError(f"the rollout server refuses a request: {error}") from error
        except GarbledReplyError as error:
            self._garbled(response, server, str(error))
            return
        try:
            self._keep(response, so_far, server)
        except GarbledReplyError as error:
            self._garbled(response, server, str(error))
        else:
            response.fault = fault or f"{server.url} aborted it"
            if fault is not None:
                self._eject(server, fault)

    def _garbled(self, response: _Response, server: Server, fault: str) -> None:
        self._counts["rollout/garbled_replies"] += 1
        response.fault = fault
        self._eject(server, fault)

    def _keep(self, response: _Response, sampled: Sampled, server: Server) -> None:
        """Add the tokens of one attempt. Raises GarbledReplyError, and adds nothing, where they cannot be true."""
        rest = response.rest.sampling
        versions = [self._version_of(name) for name in sampled.versions]
        if wrong := {
            n
            for n, v in zip(sampled.versions, versions, strict=True)
            if v is None or not response.oldest <= v <= self._newest
        }:
            raise GarbledReplyError(f"{server.url}: sampled with the weights {sorted(wrong)[0]!r}, not this run's")
        if any(not 0 <= token < self._vocab for token in sampled.token_ids):
            raise GarbledReplyError(f"{server.url}: a token outside the vocabulary of {self._vocab}")
        if len(sampled.token_ids) > rest.max_new_tokens or rest.stop_ids.intersection(sampled.token_ids[:-1]):
            raise GarbledReplyError(f"{server.url}: sampled beyond the end of the response")
        if sampled.end == "stop" and sampled.token_ids[-1:] and sampled.token_ids[-1] not in rest.stop_ids:
            raise GppoError(
                f"{server.url} ends a response at token {sampled.token_ids[-1]}, which is no end token of the run's "
                "model folder; start the server with that folder, or add the token to its generation_config.json"
            )
        fewest = rest.top_tokens
        if sum(len(place) >= fewest for place in sampled.top) < len(sampled.token_ids) and fewest:
            raise GarbledReplyError(f"{server.url}: reported fewer likely tokens than the {fewest} asked for")
        if rest.experts and sampled.experts is None and len(sampled.token_ids) > 0:
            # The server that ends a response tells the experts of all its tokens: the last is left to it.
            sampled = sampled.first(len(sampled.token_ids) - 1)
            versions = versions[: len(sampled.token_ids)]
        response.experts = sampled.experts
        response.top += sampled.top
        response.token_ids += sampled.token_ids
        response.logprobs += sampled.logprobs
        response.versions += [version for version in versions if version is not None]

    async def _pick(self, request: Request) -> Server:
        """The admitted server that is this prompt's own, so that its group shares one prefix cache."""
        deadline = time.monotonic() + self._patience.recovery_seconds
        while not self._admitted:
            await self._readmit()
            if self._admitted:
                break
            if time.monotonic() >= deadline:
                raise GppoError(f"no rollout server is left: {self._reasons()}")
            await asyncio.sleep(0.5)
        prompt = repr(request.prompt_ids).encode()
        return self._servers[max(self._admitted, key=lambda url: hashlib.sha256(url.encode() + prompt).digest())]

    def _eject(self, server: Server, fault: str) -> None:
        self._faults[server.url] = fault
        if server.url in self._admitted:
            self._admitted.remove(server.url)
            self._counts["rollout/servers_lost"] += 1

    async def _readmit(self) -> None:
        """Take back servers that answer again and hold the version in use."""
        await asyncio.gather(*(self._try(self._servers[url]) for url in self._servers if url not in self._admitted))

    async def _try(self, server: Server) -> None:
        try:
            name = await server.weights_name()
        except ServerError as error:
            self._faults[server.url] = str(error)
            return
        if self._version_of(name) == self._version:
            self._admitted.add(server.url)
            self._faults.pop(server.url, None)
        else:
            self._faults[server.url] = f"holds the weights {name!r}, not version {self._version} of this run"

    async def _abort(self, family: str) -> None:
        """No request whose name begins so may go on using a server."""
        for url in tuple(self._admitted):
            with suppress(ServerError):
                await self._servers[url].abort(family)

    def _reasons(self) -> str:
        return "; ".join(
            f"{url}: {fault.removeprefix(url).lstrip(': ')}" for url, fault in sorted(self._faults.items())
        )
