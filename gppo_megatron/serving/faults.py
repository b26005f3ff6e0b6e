"""Faults on purpose: what a rollout server may do wrong, for tests of those who depend on it."""

import asyncio
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gppo_megatron.errors import ConfigError
from gppo_megatron.rollout.embedded import EmbeddedEngine

SAMPLING = ("/generate",)
UPDATING = ("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed")
UPDATED = ("/update_weights_from_disk", "/end_weight_update")
"""After these the new weights are in use."""

KINDS = {
    "killed": "its process is gone, in the middle of an answer",
    "dropped": "the connection is gone, in the middle of an answer",
    "500": "an error of its own",
    "garbage": "no JSON",
    "stall": "no answer at all",
    "wrong-version": "its weights have another name from now on",
    "wrong-weights": "one number of its weights is another one after an update",
    "slow-start": "not ready yet, whatever is asked",
}
OTHER_NAME = "weights-of-another-run"


@dataclass(frozen=True)
class Fault:
    """Befalls `count` calls (None: all) of its kind of paths, from the `first` on, which is 1 or more."""

    kind: str
    updating: bool = False
    first: int = 1
    count: int | None = None

    def concerns(self, path: str) -> bool:
        match self.kind:
            case "slow-start":
                return True
            case "wrong-weights":
                return path in UPDATED
            case _:
                return path in (UPDATING if self.updating else SAMPLING)

    def befalls(self, call: int) -> bool:
        """call: counted from 1, among those it concerns."""
        return call >= self.first and (self.count is None or call < self.first + self.count)


def read_fault(text: str) -> Fault:
    """`KIND[@update][:FIRST[:COUNT]]`: which calls it befalls, of sampling or, with @update, of taking weights.

    Raises ConfigError.
    """
    name, *numbers = text.split(":")
    kind, at, where = name.partition("@")
    known = kind in KINDS and (not at or where == "update") and len(numbers) <= 2
    if not known or not all(number.isdecimal() and int(number) >= 1 for number in numbers):
        raise ConfigError(
            f"--fault: must be KIND[@update][:FIRST[:COUNT]] with a kind of {', '.join(KINDS)} and numbers >= 1 "
            f"(got {text!r})"
        )
    first, count = [*map(int, numbers), None, None][:2]
    return Fault(kind, bool(at), first or 1, count)


class Faulted(Protocol):
    """What is damaged: a `Sampler`."""

    def rename(self, name: str) -> None: ...

    async def read(self, look: Any) -> Mapping[str, str]: ...


class Faulty:
    """An application before which faults happen. At most one befalls a call: the first that does."""

    def __init__(self, app: ASGIApp, sampler: Faulted, faults: Iterable[Fault]) -> None:
        self._app, self._sampler = app, sampler
        self._calls = dict.fromkeys(faults, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._next(scope["path"]) if scope["type"] == "http" else None
        match fault and fault.kind:
            case None:
                await self._app(scope, receive, send)
            case "500":
                await PlainTextResponse("a fault on purpose", 500)(scope, receive, send)
            case "slow-start":
                await PlainTextResponse("not ready yet", 503)(scope, receive, send)
            case "garbage":
                text = "{nonsense" if fault and fault.updating else "data: {nonsense\n\n"
                await PlainTextResponse(text)(scope, receive, send)
            case "stall":
                while (await receive())["type"] != "http.disconnect":
                    pass
            case "wrong-version":
                self._sampler.rename(OTHER_NAME)
                await self._app(scope, receive, send)
            case "wrong-weights":
                await self._app(scope, receive, self._damaging(send))
            case kind:
                await self._broken_off(kind == "killed", bool(fault and fault.updating), scope, receive, send)

    def mend(self) -> None:
        """From now on nothing goes wrong."""
        self._calls = {}

    def _next(self, path: str) -> Fault | None:
        """Count the call; the fault that befalls it."""
        concerned = [fault for fault in self._calls if fault.concerns(path)]
        for fault in concerned:
            self._calls[fault] += 1
        return next((fault for fault in concerned if fault.befalls(self._calls[fault])), None)

    def _damaging(self, send: Send) -> Send:
        async def damaged(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                await self._sampler.read(damage)
            await send(message)

        return damaged

    async def _broken_off(self, killed: bool, at_once: bool, scope: Scope, receive: Receive, send: Send) -> None:
        def end() -> None:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ConnectionResetError("a fault on purpose")

        async def half_a_piece(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            # Half a piece leaves: a whole one may be the last, or bring an answer nearer to its end at every attempt.
            piece = message["body"]
            await send({**message, "body": piece[: len(piece) // 2], "more_body": True})
            await asyncio.sleep(0.1)
            end()

        if at_once:
            end()
        await self._app(scope, receive, half_a_piece)


def damage(engine: EmbeddedEngine) -> Mapping[str, str]:
    """Change one number of the last parameter."""
    *_, (_, last) = engine.parameters()
    last.data.view(-1)[0] += 1.0
    return {}
