"""SGLang's HTTP protocol: the one place that knows its JSON. Written for 0.5.23; older forms of an answer are read too.

Token ids go in and token ids come out; text is never tokenised again.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.rollout.engine import Request
from gppo_megatron.rollout.over_http import OverHttp, json_of, json_or_nothing, raise_error_inside
from gppo_megatron.rollout.reported import experts_of
from gppo_megatron.rollout.server import GarbledReplyError, RefusedError, Sampled, ServerError, ServerLostError
from gppo_megatron.types import Described, Meeting

TOKENS_A_PIECE = 32
"""A response streams in pieces of so many tokens: what a lost connection can cost."""

ENDS = {"stop", "length", "abort"}


@dataclass(frozen=True)
class SglangServer:
    """A `rollout.server.Server` that takes weights too.

    client: its timeouts bound every wait, reading included, so that a stall shows.
    model: what it serves; None where no request asks for experts.
    """

    url: str
    client: httpx.AsyncClient
    model: Architecture | None = None

    async def generate(self, request: Request, name: str, grown: Callable[[Sampled], None]) -> Sampled:
        """See `Server.generate`. The server's temperature is that of the log-probs; nothing is cut from its tail."""
        sampled = Sampled()
        weights: set[str] = set()
        async for reply in self._http.stream("/generate", request_body(request, name)):
            sampled = read_reply(reply, self.url)
            if request.sampling.experts and sampled.end in {"stop", "length"}:
                sampled.experts = self._experts(reply, len(request.prompt_ids) + len(sampled.token_ids))
            weights.update(sampled.versions[-1:])
            # Only the last piece tells which weights sampled which token, where they changed on the way.
            if sampled.end is not None or len(weights) <= 1:
                grown(sampled)
        if sampled.end is None:
            raise ServerLostError(f"{self.url}: the answer broke off after {len(sampled.token_ids)} tokens")
        return sampled

    def _experts(self, reply: Mapping[str, Any], tokens: int) -> NDArray[np.int16]:
        """Of all tokens of a finished answer, prompt included. Raises ServerError."""
        text = reply["meta_info"].get("routed_experts")
        if text is None or self.model is None:
            raise RefusedError(
                f"{self.url}: reports no experts, which objective.routing: replayed needs; start the server with "
                "--enable-return-routed-experts"
            )
        try:
            return experts_of(text, tokens, self.model)
        except (ValueError, TypeError) as error:
            raise GarbledReplyError(f"{self.url}: routed_experts that are none: {error}") from error

    async def weights_name(self) -> str:
        """See `Server.weights_name`."""
        for path in ("/model_info", "/get_model_info"):  # the second is the older name
            reply = await self._http.send("GET", path, None)
            if reply.status_code != httpx.codes.NOT_FOUND:
                break
        name = json_of(reply, self.url).get("weight_version")
        if not isinstance(name, str):
            raise GarbledReplyError(f"{self.url}{path}: no weight_version in the answer")
        return name

    async def abort(self, name: str) -> None:
        """See `Server.abort`: SGLang takes the name for the beginning of a request's."""
        json_or_nothing(await self._http.send("POST", "/abort_request", {"rid": name}), self.url)

    @property
    def failure(self) -> type[ServerError]:
        return ServerError

    async def pause(self) -> None:
        """Responses go back to the queue, and are taken up again from their tokens under the weights of then."""
        await self._http.call("/pause_generation", {"mode": "retract"})

    async def go_on(self) -> None:
        await self._http.call("/continue_generation", {})

    async def load_folder(self, folder: str, name: str) -> None:
        await self._http.call(
            "/update_weights_from_disk", {"model_path": folder, "weight_version": name, "flush_cache": True}
        )

    async def begin_update(self) -> None:
        """An update that was broken off, by this run or another, is ended first: the server refuses a second one."""
        try:
            await self._http.call("/begin_weight_update", {}, older_lack_it=True)
        except RefusedError:
            with suppress(RefusedError):
                await self.end_update()
            await self._http.call("/begin_weight_update", {}, older_lack_it=True)

    async def end_update(self) -> None:
        await self._http.call("/end_weight_update", {}, older_lack_it=True)

    async def load_tensors(self, pickled: bytes, name: str) -> None:
        serialized = [base64.b64encode(pickled).decode()]
        await self._http.call(
            "/update_weights_from_tensor", {"serialized_named_tensors": serialized, "weight_version": name}
        )

    async def join(self, meeting: Meeting, rank: int) -> None:
        body = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": rank,
            "world_size": meeting.size,
            "group_name": meeting.name,
            "backend": meeting.backend,
        }
        await self._http.call("/init_weights_update_group", body)

    async def leave(self, group: str) -> None:
        await self._http.call("/destroy_weights_update_group", {"group_name": group})

    async def receive(self, tensors: Sequence[Described], group: str, name: str) -> None:
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "weight_version": name,
            "load_format": "flattened_bucket",
        }
        await self._http.call("/update_weights_from_distributed", body)

    async def checksums(self) -> Mapping[str, str]:
        """By fused names; none from a server whose parameters are cut over several ranks, or lie on a GPU: its hash
        of those is another one."""
        if (await self._http.get("/server_info")).get("device") != "cpu":
            return {}
        ranks = (await self._http.call("/weights_checker", {"action": "checksum"})).get("ranks") or []
        return ranks[0]["checksums"] if len(ranks) == 1 else {}

    @property
    def _http(self) -> OverHttp:
        return OverHttp(self.url, self.client)


def request_body(request: Request, name: str) -> dict[str, Any]:
    """The body of /generate. Every sampling key is named: no default of the server's may cut the distribution."""
    sampling = request.sampling
    experts = {"return_routed_experts": True} if sampling.experts else {}
    return experts | {
        "rid": name,
        "input_ids": list(request.prompt_ids),
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": sorted(sampling.stop_ids),
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "stream_interval": TOKENS_A_PIECE,
            "sampling_seed": request.seed % 2**31,  # heeded by a server with --enable-deterministic-inference alone
        },
        "return_logprob": True,
        "top_logprobs_num": sampling.top_tokens,
        "stream": True,
    }


def read_reply(reply: Mapping[str, Any], url: str) -> Sampled:
    """What an answer, or a piece of one (each holds all that came before), says. Raises ServerError."""
    raise_error_inside(reply, url)
    try:
        info = reply["meta_info"]
        pairs = info["output_token_logprobs"] or []
        logprobs = [float(pair[0]) for pair in pairs]
        scored_ids = [int(pair[1]) for pair in pairs]
        token_ids = [int(token) for token in reply.get("output_ids", scored_ids)]
        finish = info["finish_reason"]
        end = finish if finish is None else finish["type"]
        versions = _versions(info, len(token_ids))
        top = [
            {int(pair[1]): float(pair[0]) for pair in place or []} for place in info.get("output_top_logprobs") or []
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise GarbledReplyError(f"{url}: not the answer of a server: {type(error).__name__}: {error}") from error
    if token_ids != scored_ids:
        raise GarbledReplyError(f"{url}: {len(token_ids)} tokens, but log-probs of {len(scored_ids)} or of others")
    if not all(math.isfinite(logprob) and logprob <= 0 for logprob in logprobs):
        raise GarbledReplyError(f"{url}: a log-prob that is none: {[p for p in logprobs if not p <= 0][:1]}")
    if end is not None and end not in ENDS:
        raise GarbledReplyError(f"{url}: an end of the kind {end!r}")
    return Sampled(token_ids, logprobs, versions, end, top)


def _versions(info: Mapping[str, Any], count: int) -> list[str]:
    """The weights' name for each token: by spans, or one name for all from servers that know no spans."""
    spans = info.get("weight_versions")
    if not spans:
        return [str(info["weight_version"])] * count
    names = [""] * count
    for span in spans:
        for place in range(int(span["start"]), min(int(span["end"]), count)):
            names[place] = str(span["version"])
    return names
