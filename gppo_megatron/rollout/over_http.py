"""JSON over HTTP with one rollout server: requests, streams, and how a failure is told."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from gppo_megatron.rollout.server import GarbledReplyError, RefusedError, ServerError, ServerLostError

Json = Mapping[str, Any]


@dataclass(frozen=True)
class OverHttp:
    """client: its timeouts bound every wait, reading included, so that a stall shows. All methods raise ServerError."""

    url: str
    client: httpx.AsyncClient

    async def send(self, method: str, path: str, body: Json | None, query: Json | None = None) -> httpx.Response:
        """The answer, whatever its status."""
        try:
            return await self.client.request(method, self.url + path, json=body, params=query)
        except httpx.HTTPError as error:
            raise ServerLostError(f"{self.url}{path}: {_reason(error)}") from error

    async def get(self, path: str) -> Json:
        return json_of(await self.send("GET", path, None), self.url)

    async def call(self, path: str, body: Json, query: Json | None = None, older_lack_it: bool = False) -> Json:
        """POST to an endpoint that says whether it succeeded. Raises ServerError with the server's reason if not."""
        reply = await self.send("POST", path, body, query)
        if older_lack_it and reply.status_code == httpx.codes.NOT_FOUND:
            return {}
        answer = json_or_nothing(reply, self.url)
        if answer.get("success") is False:
            raise RefusedError(f"{self.url}{path}: {answer.get('message') or answer.get('error') or 'no reason given'}")
        return answer

    async def stream(self, path: str, body: Json) -> AsyncIterator[Json]:
        """The pieces of a streamed answer."""
        try:
            async with self.client.stream("POST", self.url + path, json=body) as reply:
                if reply.is_error:
                    await reply.aread()
                    raise_refusal(reply, self.url)
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and (piece := line.removeprefix("data:").strip()) != "[DONE]":
                        yield _piece(piece, self.url)
        except httpx.HTTPError as error:
            raise ServerLostError(f"{self.url}{path}: {_reason(error)}") from error


async def is_router(http: OverHttp) -> bool:
    """Whether this is no server but an SGLang router, which lists its workers."""
    try:
        return isinstance((await http.get("/workers")).get("workers"), list)
    except ServerError:
        return False


def json_of(reply: httpx.Response, url: str) -> Json:
    if reply.is_error:
        raise_refusal(reply, url)
    return _piece(reply.text, url)


def json_or_nothing(reply: httpx.Response, url: str) -> Json:
    return json_of(reply, url) if reply.is_error or reply.text.startswith("{") else {}


def raise_refusal(reply: httpx.Response, url: str) -> None:
    """A 4xx but for 408 and 429 says that this request is wrong; anything else, that the server is unwell."""
    reason = reply.text[:500]
    if reply.text.startswith("{"):
        body = _piece(reply.text, url)
        reason = error_text(body) if "error" in body else str(body.get("message", reason))
    message = f"{url}{reply.request.url.path}: HTTP {reply.status_code}: {reason}"
    lost = reply.is_server_error or reply.status_code in (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)
    raise ServerLostError(message) if lost else RefusedError(message)


def raise_error_inside(reply: Json, url: str) -> None:
    """Raises the error that a piece of a stream holds, if it does."""
    if "error" in reply:
        error, message = reply["error"], f"{url}: {error_text(reply)}"
        refused = isinstance(error, Mapping) and 400 <= int(error.get("code") or 500) < 500
        raise RefusedError(message) if refused else ServerLostError(message)


def error_text(reply: Json) -> str:
    """The reason in an error's body, which is text or holds a message."""
    error = reply["error"]
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)


def _piece(text: str, url: str) -> Json:
    try:
        piece = json.loads(text)
    except ValueError as error:
        raise GarbledReplyError(f"{url}: {text[:80]!r} is not JSON") from error
    if not isinstance(piece, Mapping):
        raise GarbledReplyError(f"{url}: {text[:80]!r} is not an answer")
    return piece


def _reason(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
