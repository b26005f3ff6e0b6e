"""An SGLang router as a directory: the workers it lists, to each of which the run then speaks itself."""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence

import httpx

from gppo_megatron.errors import ConfigError, SyncError
from gppo_megatron.rollout.over_http import OverHttp, json_of
from gppo_megatron.rollout.server import ServerError

PATHS = ("/workers", "/list_workers")
"""The second is the older one, which answers with addresses alone."""

RANK = re.compile(r"@\d+$")
"""What a router adds to the address of a worker that it lists once for each of its data-parallel ranks."""


async def workers_of(http: OverHttp, seconds: float) -> tuple[str, ...]:
    """The addresses of a router's workers, each once; waits so long until it lists one.

    Raises SyncError where it answers nothing or lists none in time, and ConfigError for what is no router, or has
    workers that no run can use.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            if workers := await _listed(http):
                return workers
            fault = "lists no worker"
        except ServerError as error:
            fault = f"cannot be asked for its workers: {str(error).removeprefix(http.url).lstrip(': ')}"
        if time.monotonic() >= deadline:
            raise SyncError(
                f"rollout.router: {http.url} {fault}, after {seconds:g} s; start it and its workers, or correct it"
            )
        await asyncio.sleep(0.5)


async def _listed(http: OverHttp) -> tuple[str, ...]:
    for path in PATHS:
        reply = await http.send("GET", path, None)
        if reply.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            answer = json_of(reply, http.url)
            return _addresses(answer.get("workers", answer.get("urls")), http.url)
    raise ConfigError(
        f"rollout.router: {http.url} is no router: it knows neither {' nor '.join(PATHS)}; "
        "list a server itself in rollout.urls"
    )


def _addresses(listed: object, router: str) -> tuple[str, ...]:
    """listed: addresses, or descriptions of workers that hold one each."""
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise ConfigError(f"rollout.router: {router} lists no workers in its answer; list them in rollout.urls")
    found: dict[str, None] = {}
    for worker in listed:
        described = worker if isinstance(worker, Mapping) else {"url": worker}
        kind, url = described.get("worker_type", "regular"), RANK.sub("", str(described.get("url"))).rstrip("/")
        if kind != "regular" or not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"rollout.router: {router} has the {kind} worker {url}, but a run speaks HTTP alone, and with servers "
                "that do not only prefill or decode"
            )
        found[url] = None
    return tuple(found)
