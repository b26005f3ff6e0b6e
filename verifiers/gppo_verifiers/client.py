"""A `Judge` whose answers are judged by verifier services on other nodes."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx

from gppo_verifiers.errors import ServiceError
from gppo_verifiers.types import Answer, Status, Verdict
from gppo_verifiers.wire import JOBS, METRICS, RESULTS, Job, job_to_json, to_bytes, verdict_from_json

BATCH, BATCH_BYTES = 16, 32 << 20
WAIT_SECONDS = 20.0
"""How long a service may hold a question for verdicts open."""
FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 0.5, 30.0


@dataclass(frozen=True)
class Patience:
    """request_seconds: how long a node may take to reply. recovery_seconds: how long an answer waits while none of its
    batch is judged; a node is given up on after half of it. attempts: times an answer is judged that gets `infra`."""

    request_seconds: float = 30.0
    recovery_seconds: float = 600.0
    attempts: int = 3


class NodeError(Exception):
    """A node did not do what it was asked; nothing is known of the answers. rest_seconds: when to ask it again."""

    def __init__(self, reason: str, rest_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.rest_seconds = rest_seconds


class RefusedError(Exception):
    """The request itself is wrong, at every node."""


@dataclass
class Node:
    """A service. faults: in a row. load: answers it has of this client; given: all it ever got."""

    url: str
    rests_until: float = 0.0
    faults: int = 0
    fault: str = ""
    load: int = 0
    given: int = 0


@dataclass
class Batch:
    """Answers under way. left: the JSON of those without a verdict, by key. infra: how often each got that status."""

    left: dict[str, bytes]
    verdicts: dict[str, Verdict]
    infra: Counter[str]
    moved: float

    def take(self, verdicts: Mapping[str, Verdict], attempts: int) -> None:
        """Settle the answers that are judged; one whose judge failed is left, unless that was its last attempt."""
        for key, verdict in verdicts.items():
            self.moved = time.monotonic()
            self.infra[key] += verdict.status is Status.INFRA
            if verdict.status is not Status.INFRA or self.infra[key] >= attempts:
                self.settle(key, verdict)

    def settle(self, key: str, verdict: Verdict) -> None:
        del self.left[key]
        self.verdicts[key] = verdict


class ServiceJudge:
    """Implements `Judge` with the services at `urls`.

    A node that fails, is full or has taken itself out is asked again later, and its answers go to another. A verdict
    is never asked for twice. An answer that no node could judge has no score.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None,
        patience: Patience,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not urls:
            raise ValueError("needs the URL of a verifier service")
        self._nodes = [Node(url.rstrip("/")) for url in dict.fromkeys(urls)]
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._patience = patience
        self._transport = transport

    def check(self) -> None:
        """Raises ServiceError where no node answers to this token."""
        asyncio.run(self._check())

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return asyncio.run(self._judge(answers))

    def close(self) -> None:
        """Connections are closed with each call; there is nothing else."""

    def _client(self) -> httpx.AsyncClient:
        timeout = httpx.Timeout(self._patience.request_seconds, pool=None)
        limits = httpx.Limits(max_connections=None)
        # Nodes are neighbours: no proxy of the environment stands between.
        return httpx.AsyncClient(
            headers=self._headers, timeout=timeout, limits=limits, transport=self._transport, trust_env=False
        )

    async def _check(self) -> None:
        async with self._client() as client:
            replies = await asyncio.gather(
                *(self._send(client, node, "GET", METRICS, b"") for node in self._nodes), return_exceptions=True
            )
        faults = [str(reply) for reply in replies if isinstance(reply, NodeError | RefusedError)]
        if len(faults) == len(self._nodes):
            raise ServiceError(f"no verifier service answers: {'; '.join(faults)}")

    async def _judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        family = uuid4().hex
        keys = [f"{family}-{number}" for number in range(len(answers))]
        verdicts: dict[str, Verdict] = {}
        jobs: dict[str, bytes] = {}
        for key, answer in zip(keys, answers, strict=True):
            try:
                jobs[key] = to_bytes(job_to_json(Job(key, answer)))
            except (ValueError, TypeError, RecursionError) as error:
                verdicts[key] = Verdict(None, Status.CRASH, f"the task is no JSON: {error}"[:500])
        async with self._client() as client, asyncio.TaskGroup() as tasks:
            batches = [
                tasks.create_task(self._settle(client, Batch(part, {}, Counter(), time.monotonic())))
                for part in _parts(jobs)
            ]
        for batch in batches:
            verdicts |= batch.result()
        return [verdicts[key] for key in keys]

    async def _settle(self, client: httpx.AsyncClient, batch: Batch) -> dict[str, Verdict]:
        """The verdicts on a batch, by as many nodes as it takes."""
        last: Node | None = None
        while batch.left:
            node = self._pick(last)
            if node is None:
                await asyncio.sleep(0.1)
            else:
                last = await self._advance(client, batch, node)
            if time.monotonic() - batch.moved > self._patience.recovery_seconds:
                for key in list(batch.left):
                    batch.settle(key, Verdict(None, Status.INFRA, f"no service judged it: {self._reasons()}"[:500]))
        return batch.verdicts

    async def _advance(self, client: httpx.AsyncClient, batch: Batch, node: Node) -> Node:
        """One attempt at what is left, by one node, which is returned."""
        load = len(batch.left)
        node.load += load
        node.given += load
        try:
            jobs = b'{"jobs": [' + b", ".join(batch.left.values()) + b"]}"
            taken = (await self._send(client, node, "POST", JOBS, jobs)).get("keys")
            if not isinstance(taken, list) or not taken or not batch.left.keys() >= set(map(str, taken)):
                raise NodeError(f"{node.url}: does not say which answers it took")
            node.faults = 0
            await self._fetch(client, batch, node, set(map(str, taken)))
        except NodeError as error:
            node.fault = str(error)
            node.faults += error.rest_seconds is None
            rest = error.rest_seconds or min(LONGEST_REST_SECONDS, FIRST_REST_SECONDS * 2 ** (node.faults - 1))
            node.rests_until = time.monotonic() + rest
        except RefusedError as error:
            await self._single(client, batch, str(error))
        finally:
            node.load -= load
        return node

    async def _single(self, client: httpx.AsyncClient, batch: Batch, reason: str) -> None:
        """One of these answers cannot be sent: try each alone, so that it is the only one without a score."""
        jobs = dict(batch.left)
        if len(jobs) == 1:
            batch.settle(next(iter(jobs)), Verdict(None, Status.INFRA, reason[:500]))
            return
        for key, job in jobs.items():
            alone = Batch({key: job}, {}, Counter(), time.monotonic())
            batch.settle(key, (await self._settle(client, alone))[key])

    async def _fetch(self, client: httpx.AsyncClient, batch: Batch, node: Node, asked: set[str]) -> None:
        """Ask for the verdicts on these answers of the batch until the node has told them all."""
        began = time.monotonic()
        patience = self._patience.recovery_seconds / 2
        while asked:
            wait = min(WAIT_SECONDS, patience / 2)
            reply = await self._send(client, node, "POST", RESULTS, to_bytes({"keys": sorted(asked), "wait": wait}))
            try:
                verdicts = {str(key): verdict_from_json(given) for key, given in reply["verdicts"].items()}
                pending = {str(key) for key in reply["pending"]} - verdicts.keys()
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise NodeError(f"{node.url}: not the answer of a service: {error}") from error
            if not verdicts.keys() | pending <= asked:
                raise NodeError(f"{node.url}: speaks of answers that it was not asked for")
            batch.take(verdicts, self._patience.attempts)
            if asked != verdicts.keys() | pending:
                raise NodeError(f"{node.url}: has forgotten answers that it took")
            if pending and time.monotonic() - max(began, batch.moved) > patience:
                raise NodeError(f"{node.url}: has judged nothing for {patience:g} s")
            asked = pending

    async def _send(
        self, client: httpx.AsyncClient, node: Node, method: str, path: str, body: bytes
    ) -> Mapping[str, Any]:
        """The reply's JSON, empty for other text. Raises NodeError or RefusedError."""
        timeout = httpx.Timeout(self._patience.request_seconds + (WAIT_SECONDS if path == RESULTS else 0.0), pool=None)
        try:
            reply = await client.request(method, node.url + path, content=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise NodeError(f"{node.url}{path}: {type(error).__name__}: {error}".rstrip(": ")) from error
        reason = f"{node.url}{path}: HTTP {reply.status_code}: {reply.text[:300]}"
        if reply.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE):
            raise RefusedError(reason)
        if not reply.is_success:
            raise NodeError(reason, _retry_seconds(reply))
        try:
            given = json.loads(reply.content) if reply.headers.get("content-type") == "application/json" else {}
        except ValueError as error:
            raise NodeError(f"{node.url}{path}: not JSON: {error}") from error
        return given if isinstance(given, dict) else {}

    def _pick(self, last: Node | None) -> Node | None:
        """The node with the least to do, another than the last where there is one; None while all rest."""
        now = time.monotonic()
        awake = [node for node in self._nodes if node.rests_until <= now]
        others = [node for node in awake if node is not last]
        return min(others or awake, key=lambda node: (node.load, node.given), default=None)

    def _reasons(self) -> str:
        return "; ".join(node.fault for node in self._nodes if node.fault) or "each said that it could not"


def _parts(jobs: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    part: dict[str, bytes] = {}
    for key, job in jobs.items():
        if len(part) == BATCH or (part and sum(map(len, part.values())) + len(job) > BATCH_BYTES):
            yield part
            part = {}
        part[key] = job
    if part:
        yield part


def _retry_seconds(reply: httpx.Response) -> float | None:
    given = reply.headers.get("retry-after", "")
    return min(float(given), LONGEST_REST_SECONDS) if given.isdecimal() else None
