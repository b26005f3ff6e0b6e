"""vLLM's HTTP protocol: the one place that knows its JSON. Written for 0.32.0, token ids in and out.

The server needs `--enable-scale-out` (tokens in, tokens out), `VLLM_SERVER_DEV_MODE=1` (weights) and
`--logprobs-mode processed_logprobs` (log-probs at the temperature that was sampled with).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httpx

from gppo_megatron.rollout.engine import Request
from gppo_megatron.rollout.over_http import OverHttp, raise_error_inside
from gppo_megatron.rollout.server import GarbledReplyError, RefusedError, Sampled, ServerError, ServerLostError
from gppo_megatron.types import Described, Meeting

TOKENS_A_PIECE = 32
"""After so many tokens each, a response under way asks which weights sample it: what a lost connection can cost."""

ID_PREFIX = "generate-tokens-"
"""What the server puts before the name of a request."""

NOTHING = "e3b0c44298fc1c14"
"""The checksum of no bytes: on a CPU the server packs its projections elsewhere and leaves their parameters empty."""

FLOOR = -9999.0
"""What the server writes for a log-prob that is no number or minus infinity."""


@dataclass(frozen=True)
class VllmServer:
    """A `rollout.server.Server` that takes weights through a folder alone.

    client: its timeouts bound every wait, reading included. under_way: names of requests that are not answered yet.
    vocab: the server dies of a request for more log-probs than that.
    """

    url: str
    client: httpx.AsyncClient
    vocab: int
    under_way: set[str] = field(default_factory=set)

    async def generate(self, request: Request, name: str, grown: Callable[[Sampled], None]) -> Sampled:
        """See `Server.generate`. Only the last piece names the weights. Until then a response is told of where the
        server held the same ones before it and now: a change of weights aborts what is under way."""
        sampled = Sampled()
        long = request.sampling.max_new_tokens > TOKENS_A_PIECE
        before = await self.weights_name() if long else ""
        told = 0
        self.under_way.add(name)
        try:
            async for piece in self._http.stream("/inference/v1/generate", request_body(request, name, self.vocab)):
                add_piece(sampled, piece, self.url)
                if sampled.end is None and len(sampled.token_ids) >= told + TOKENS_A_PIECE:
                    told = len(sampled.token_ids)
                    if await self.weights_name() == before:
                        grown(_as_of(sampled, before))
        finally:
            self.under_way.discard(name)
        if sampled.end is None:
            raise ServerLostError(f"{self.url}: the answer broke off after {len(sampled.token_ids)} tokens")
        grown(sampled)
        return sampled

    async def weights_name(self) -> str:
        """See `Server.weights_name`."""
        try:
            name = (await self._http.get("/weight_info")).get("weight_version")
        except RefusedError as error:
            raise RefusedError(f"{error}; start the server with VLLM_SERVER_DEV_MODE=1") from error
        if not isinstance(name, str):
            raise GarbledReplyError(f"{self.url}/weight_info: no weight_version in the answer")
        return name

    async def abort(self, name: str) -> None:
        """See `Server.abort`."""
        names = [ID_PREFIX + each for each in self.under_way if each.startswith(name)]
        if names:
            await self._http.call("/inference/v1/abort_requests", {"request_ids": names})

    @property
    def failure(self) -> type[ServerError]:
        return ServerError

    async def pause(self) -> None:
        """Responses are ended with what they have, and caches emptied; who asked takes them up again."""
        try:
            await self._http.call("/pause", {}, {"mode": "abort"})
        except RefusedError as error:
            raise RefusedError(f"{error}; start the server with VLLM_SERVER_DEV_MODE=1") from error

    async def go_on(self) -> None:
        await self._http.call("/resume", {})

    async def load_folder(self, folder: str, name: str) -> None:
        """A folder that the server cannot read ends it."""
        await self._http.call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        await self._http.call("/update_weight_version", {"new_version": name})

    async def begin_update(self) -> None:
        raise RefusedError(self._only_folders())

    async def end_update(self) -> None:
        raise RefusedError(self._only_folders())

    async def load_tensors(self, pickled: bytes, name: str) -> None:
        raise RefusedError(self._only_folders())

    async def join(self, meeting: Meeting, rank: int) -> None:
        raise RefusedError(self._only_folders())

    async def leave(self, group: str) -> None:
        """It is in none."""

    async def receive(self, tensors: Sequence[Described], group: str, name: str) -> None:
        raise RefusedError(self._only_folders())

    async def checksums(self) -> Mapping[str, str]:
        """By fused names, of those parameters that one rank holds whole and unpacked."""
        answer = await self._http.call("/weight_checker", {"action": "checksum"})
        try:
            held = {
                name.rpartition(":")[::2]: str(digest)[: len(NOTHING)] for name, digest in answer["checksums"].items()
            }
        except (KeyError, AttributeError) as error:
            raise GarbledReplyError(f"{self.url}/weight_checker: no checksums in the answer") from error
        if len({rank for rank, _ in held}) != 1:
            return {}
        return {name: digest for (_, name), digest in held.items() if digest != NOTHING}

    def _only_folders(self) -> str:
        return f"{self.url} takes weights through a folder alone: set rollout.sync to disk"

    @property
    def _http(self) -> OverHttp:
        return OverHttp(self.url, self.client)


def request_body(request: Request, name: str, vocab: int) -> dict[str, Any]:
    """The body of /inference/v1/generate. Every sampling key is named; the server ignores unknown ones silently."""
    sampling = request.sampling
    # The sampled token comes first and takes one of the places, whether it is among the likeliest or not; -1 is all.
    likeliest = sampling.top_tokens + 1 if sampling.top_tokens else 0
    return {
        "request_id": name,
        "token_ids": list(request.prompt_ids),
        "sampling_params": {
            "n": 1,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": 0,
            "stop_token_ids": sorted(sampling.stop_ids),
            "ignore_eos": True,  # the run's own end tokens are all of them
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": likeliest if likeliest <= vocab else -1,
            "seed": request.seed % 2**63,
            "detokenize": False,
        },
        "stream": True,
    }


def add_piece(sampled: Sampled, piece: Mapping[str, Any], url: str) -> None:
    """Take in what one piece of a stream adds. Raises ServerError."""
    raise_error_inside(piece, url)
    try:
        for choice in piece["choices"]:
            _add(sampled, choice)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise GarbledReplyError(f"{url}: not the answer of a server: {type(error).__name__}: {error}") from error


def _add(sampled: Sampled, choice: Mapping[str, Any]) -> None:
    token_ids = [int(token) for token in choice.get("token_ids") or []]
    content = (choice.get("logprobs") or {}).get("content") or []
    if token_ids != [int(each["token_id"]) for each in content]:
        raise ValueError(f"{len(token_ids)} tokens, but log-probs of {len(content)} or of others")
    logprobs = [float(each["logprob"]) for each in content]
    if bad := [each for each in logprobs if not FLOOR < each <= 0 or not math.isfinite(each)]:
        raise ValueError(f"a log-prob that is none: {bad[0]}")
    sampled.token_ids += token_ids
    sampled.logprobs += logprobs
    sampled.top += [{int(t["token_id"]): float(t["logprob"]) for t in each["top_logprobs"]} for each in content]
    end = choice.get("finish_reason")
    if end is None:
        return
    if end not in {"stop", "length", "abort"}:
        raise ValueError(f"an end of the kind {end!r}")
    names = [
        str(span["version"]) for span in choice["weight_versions"] or [] for _ in range(span["start"], span["end"])
    ]
    if len(names) != len(sampled.token_ids):
        raise ValueError(f"weights are named of {len(names)} tokens, but {len(sampled.token_ids)} came")
    sampled.versions = names
    sampled.end = cast(Any, end)


def _as_of(sampled: Sampled, weights: str) -> Sampled:
    """A copy of a response under way, all of it sampled by the weights of that name."""
    count = len(sampled.token_ids)
    return Sampled(list(sampled.token_ids), list(sampled.logprobs), [weights] * count, None, list(sampled.top))
