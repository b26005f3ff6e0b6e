"""The routes of the verifier service; `gppo_verifiers.wire` has their JSON."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gppo_verifiers.service.canaries import watch
from gppo_verifiers.service.desk import Desk, FullError, RefusedError
from gppo_verifiers.types import Judge, Status
from gppo_verifiers.wire import HEALTH, JOBS, LARGEST_BATCH, METRICS, RESULTS, job_from_json, to_bytes, verdict_to_json

LARGEST_BODY_BYTES = 256 << 20
LONGEST_WAIT_SECONDS = 60.0

Handler = Callable[[Request], Awaitable[Response]]


def service(desk: Desk, judge: Judge, kinds: frozenset[str], canary_seconds: float, token: str | None) -> Starlette:
    """The application. kinds: of task that `judge` takes. token: what every request but /health must bear."""
    api = _Api(desk, kinds)

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(desk.run()), asyncio.create_task(watch(desk, judge, canary_seconds))]
        yield
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def guarded(handler: Handler) -> Handler:
        return _answering(handler if token is None else _bearing(handler, token))

    routes = [
        Route(JOBS, guarded(api.submit), methods=["POST"]),
        Route(RESULTS, guarded(api.results), methods=["POST"]),
        Route(METRICS, guarded(api.metrics)),
        Route(HEALTH, api.health),
    ]
    return Starlette(routes=routes, lifespan=running)


def exposition(desk: Desk) -> str:
    """The node's metrics, as Prometheus reads them."""
    judged = [f'gppo_verifier_jobs_total{{status="{each.value}"}} {desk.counts[each.value]}' for each in Status]
    lines = [
        "# TYPE gppo_verifier_jobs_total counter",
        *judged,
        "# TYPE gppo_verifier_job_seconds_total counter",
        f"gppo_verifier_job_seconds_total {desk.judged_seconds}",
        "# TYPE gppo_verifier_refused_jobs_total counter",
        f"gppo_verifier_refused_jobs_total {desk.counts['refused']}",
        "# TYPE gppo_verifier_taken_out_total counter",
        f"gppo_verifier_taken_out_total {desk.counts['taken_out']}",
        "# TYPE gppo_verifier_waiting_jobs gauge",
        f"gppo_verifier_waiting_jobs {desk.waiting}",
        "# TYPE gppo_verifier_running_jobs gauge",
        f"gppo_verifier_running_jobs {desk.running}",
        "# TYPE gppo_verifier_serving gauge",
        f"gppo_verifier_serving {int(not desk.refusal)}",
    ]
    return "\n".join(lines) + "\n"


class _Api:
    def __init__(self, desk: Desk, kinds: frozenset[str]) -> None:
        self._desk = desk
        self._kinds = kinds

    async def submit(self, request: Request) -> Response:
        given = _batch(await _body(request), "jobs")
        jobs = [job_from_json(each) for each in given]
        for job in jobs:
            if job.answer.task.kind not in self._kinds:
                raise ValueError(f"no tasks of kind {job.answer.task.kind!r} here; there is {', '.join(self._kinds)}")
        try:
            taken = self._desk.submit(jobs)
        except RefusedError as error:
            status = 429 if isinstance(error, FullError) else 503
            return _reply({"error": str(error)}, status, {"Retry-After": str(error.retry_seconds)})
        return _reply({"keys": taken}, 202)

    async def results(self, request: Request) -> Response:
        body = await _body(request)
        keys = _batch(body, "keys")
        wait = body.get("wait", 0)
        if not all(isinstance(key, str) for key in keys) or not isinstance(wait, int | float) or not wait >= 0:
            raise ValueError("keys are text, and wait is seconds")
        results = await self._desk.results(keys, min(wait, LONGEST_WAIT_SECONDS))
        verdicts = {key: verdict_to_json(verdict) for key, verdict in results.verdicts.items()}
        return _reply({"verdicts": verdicts, "pending": results.pending, "unknown": results.unknown})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(exposition(self._desk), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        refusal = self._desk.refusal
        return JSONResponse({"serving": not refusal, "reason": refusal}, 503 if refusal else 200)


async def _body(request: Request) -> dict[str, Any]:
    if int(request.headers.get("content-length", 0)) > LARGEST_BODY_BYTES:
        raise ValueError(f"a request of more than {LARGEST_BODY_BYTES} bytes")
    body = json.loads(await request.body())
    if not isinstance(body, dict):
        raise ValueError("a request is a JSON object")
    return body


def _batch(body: dict[str, Any], name: str) -> list[Any]:
    given = body.get(name)
    if not isinstance(given, list) or not 1 <= len(given) <= LARGEST_BATCH:
        raise ValueError(f"{name} is a list of 1 to {LARGEST_BATCH}")
    return given


def _reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_bytes(value), status, headers, "application/json")


def _answering(handler: Handler) -> Handler:
    """A mistake of the asker's is answered with 400 and its reason."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except (ValueError, RecursionError) as error:
            return JSONResponse({"error": str(error)[:500]}, 400)

    return answer


def _bearing(handler: Handler, token: str) -> Handler:
    wanted = f"Bearer {token}".encode()

    async def answer(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), wanted):
            return JSONResponse({"error": "the token is missing or another"}, 401)
        return await handler(request)

    return answer
