"""The seam to a rollout server of another process: one request at a time, and what can go wrong with it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from gppo_megatron.rollout.engine import Request


@dataclass
class Sampled:
    """What a server has sampled so far of one response; grows while it streams.

    token_ids, logprobs (nats, of the tempered distribution), versions (the server's name of the weights that sampled
    the token): one entry a token. end: None while the response goes on; "abort" where the server gave up on it.
    top: log-probs of likely tokens, the likeliest among them, at each place; empty where none were asked for.
    experts: int16 [prompt + n, layers, k] of a response that has ended, as `Completion.experts`; where asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    end: Literal["stop", "length", "abort"] | None = None
    top: list[dict[int, float]] = field(default_factory=list)
    experts: NDArray[np.int16] | None = None

    def first(self, count: int) -> "Sampled":
        """Its first tokens, as of a response that has not ended."""
        return Sampled(self.token_ids[:count], self.logprobs[:count], self.versions[:count], None, self.top[:count])


class ServerError(Exception):
    """One request to one server failed; the message says which server and how."""


class ServerLostError(ServerError):
    """The server did not answer, broke off, stalled, or is not able to serve: another one may."""


class GarbledReplyError(ServerError):
    """The server answered what cannot be: nothing of the answer may be used."""


class RefusedError(ServerError):
    """The server refuses this very request, as every other one of its kind would."""


class Server(Protocol):
    """A rollout server, by its URL. All methods raise ServerError."""

    @property
    def url(self) -> str: ...

    async def generate(self, request: Request, name: str, grown: Callable[[Sampled], None]) -> Sampled:
        """Sample one response. name: unique, to abort it by. grown: told of every piece, so that none is lost."""
        ...

    async def weights_name(self) -> str:
        """What the server calls the weights it holds; also shows that it is up."""
        ...

    async def abort(self, name: str) -> None:
        """End the requests whose names begin so; they answer with what they have."""
        ...
