"""The routes, and the JSON of SGLang's protocol from the server's side."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from secrets import randbits
from typing import Any
from uuid import uuid4

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from gppo_megatron.errors import SyncError
from gppo_megatron.fused_checksums import checksum, fused_checksums
from gppo_megatron.rollout.engine import Request, Sampling
from gppo_megatron.serving.sampler import Response, Sampler
from gppo_megatron.serving.weights import WeightUpdates

UNCUT = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""The only values these may have: the embedded engine samples from the whole distribution."""

SAMPLING_KEYS = {"temperature", "max_new_tokens", "stop_token_ids", "stream_interval", "sampling_seed", "n", *UNCUT}


def serving(sampler: Sampler, updates: WeightUpdates, vocab: int, model: str) -> Starlette:
    """The application. vocab: token ids beyond it are refused. model: its folder, told to those who ask."""
    api = _Api(sampler, updates, vocab, model)

    @asynccontextmanager
    async def sampling(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(sampler.run())
        yield
        task.cancel()

    posts = {
        "/generate": api.generate,
        "/abort_request": api.abort,
        "/pause_generation": api.pause,
        "/continue_generation": api.go_on,
        "/weights_checker": api.checksums,
        "/update_weight_version": api.rename,
        "/update_weights_from_disk": updates.from_disk,
        "/begin_weight_update": updates.begin,
        "/end_weight_update": updates.end,
        "/update_weights_from_tensor": updates.from_tensor,
        "/init_weights_update_group": updates.join_group,
        "/update_weights_from_distributed": updates.from_distributed,
        "/destroy_weights_update_group": updates.leave_group,
    }
    routes = [Route(path, _answering(handler), methods=["POST"]) for path, handler in posts.items()]
    for path in ("/model_info", "/get_model_info", "/server_info", "/v1/loads"):
        routes.append(Route(path, _answering(api.info)))
    for path in ("/health", "/ready", "/health_generate"):
        routes.append(Route(path, _answering(api.health)))
    routes.append(Route("/flush_cache", _answering(api.health), methods=["GET", "POST"]))
    return Starlette(routes=routes, lifespan=sampling)


def _answering(handler: Any) -> Any:
    """A route that answers a mistake of the asker's with 400 and its reason."""

    async def answer(http: HttpRequest) -> HttpResponse:
        try:
            text = await http.body()
            reply = await handler(json.loads(text) if text else {})
        except ClientDisconnect:
            return HttpResponse(status_code=400)  # to nobody
        except (ValueError, KeyError, TypeError, SyncError) as error:
            reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError | TypeError) else str(error)
            return JSONResponse({"success": False, "error": {"message": reason, "code": 400}}, status_code=400)
        return reply if isinstance(reply, HttpResponse) else JSONResponse(reply)

    return answer


class _Api:
    """Sampling and questions; `WeightUpdates` has the rest."""

    def __init__(self, sampler: Sampler, updates: WeightUpdates, vocab: int, model: str) -> None:
        self._sampler = sampler
        self._vocab = vocab
        self._model = model

    async def generate(self, body: Mapping[str, Any]) -> HttpResponse:
        responses = self._responses(body)
        for response in responses:
            self._sampler.submit(response)
        if body.get("stream"):
            return StreamingResponse(_events(responses[0]), media_type="text/event-stream")
        for response in responses:
            while (await response.pieces.get()).end is None:
                pass
        answers = [_answer(response) for response in responses]
        single = len(answers) == 1 and not isinstance(body["input_ids"][0], list)
        return JSONResponse(answers[0] if single else answers)

    async def abort(self, body: Mapping[str, Any]) -> HttpResponse:
        if body.get("abort_all") or body.get("rid"):
            self._sampler.abort("" if body.get("abort_all") else body["rid"])
        return HttpResponse()

    async def pause(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        mode = body.get("mode", "abort")
        if mode not in {"abort", "retract", "in_place"}:
            raise ValueError(f"mode must be abort, retract or in_place, got {mode!r}")
        self._sampler.pause(aborting=mode == "abort")
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def go_on(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._sampler.go_on()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def rename(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._sampler.rename(body["new_version"])
        return {"success": True, "message": "", "new_version": body["new_version"]}

    async def checksums(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if body.get("action", "checksum") != "checksum":
            raise ValueError(f"only the action 'checksum' is known, got {body['action']!r}")
        sums = dict(await self._sampler.read(lambda engine: fused_checksums(engine.parameters())))
        whole = checksum("".join(name + sums[name] for name in sorted(sums)).encode())
        rank = {"checksums": sums, "per_gpu_checksum": whole, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}
        return {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": whole}

    async def info(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "model_path": self._model,
            "weight_version": self._sampler.weights,
            "is_generation": True,
            "device": "cpu",
            "max_context_len": self._sampler.context,
            "loads": [{"num_running_reqs": self._sampler.running}],
        }

    async def health(self, body: Mapping[str, Any]) -> HttpResponse:
        return HttpResponse()

    def _responses(self, body: Mapping[str, Any]) -> list[Response]:
        """A response for each prompt and sample. Raises ValueError for what the engine cannot sample."""
        ids, options = body["input_ids"], dict(body.get("sampling_params") or {})
        prompts = ids if ids and isinstance(ids[0], list) else [ids]
        if unknown := set(options) - SAMPLING_KEYS:
            raise ValueError(
                f"unknown field `{sorted(unknown)[0]}`, expected one of {', '.join(sorted(SAMPLING_KEYS))}"
            )
        for key, value in UNCUT.items():
            if options.get(key, value) != value:
                raise ValueError(f"{key} = {options[key]}: the embedded engine samples from the whole distribution")
        for prompt in prompts:
            if not prompt or not all(isinstance(token, int) and 0 <= token < self._vocab for token in prompt):
                raise ValueError(f"input_ids must be token ids in [0, {self._vocab}), at least one")
        stops = frozenset(options.get("stop_token_ids") or ())
        likeliest = body.get("top_logprobs_num") or 0
        experts = bool(body.get("return_routed_experts")) and self._sampler.has_experts
        most = options.get("max_new_tokens", 128)
        sampling = Sampling(options.get("temperature", 1.0), most, stops, likeliest, experts)
        name, samples = body.get("rid") or uuid4().hex, options.get("n", 1)
        seeds = count(options["sampling_seed"]) if "sampling_seed" in options else iter(lambda: randbits(62), None)
        names = [f"{name}-{number}" for number in range(len(prompts) * samples)]
        return [
            Response(own, Request(tuple(prompt), sampling, next(seeds)))
            for own, prompt in zip(
                names if len(names) > 1 else [name],
                (prompt for prompt in prompts for _ in range(samples)),
                strict=True,
            )
        ]


async def _events(response: Response) -> AsyncIterator[str]:
    while True:
        piece = await response.pieces.get()
        yield f"data: {json.dumps(_answer(piece))}\n\n"
        if piece.end is not None and response.pieces.empty():
            yield "data: [DONE]\n\n"
            return


def _answer(response: Response) -> dict[str, Any]:
    """A response as it is now."""
    names = response.versions
    starts = [place for place, name in enumerate(names) if place == 0 or name != names[place - 1]]
    info: dict[str, Any] = {
        "id": response.name,
        "finish_reason": None if response.end is None else _finish(response),
        "prompt_tokens": len(response.request.prompt_ids),
        "completion_tokens": len(response.token_ids),
        "weight_version": names[-1] if names else "",
        "output_token_logprobs": [
            [lp, token, None] for lp, token in zip(response.logprobs, response.token_ids, strict=True)
        ],
    }
    if response.top:
        info["output_top_logprobs"] = [[[lp, token, None] for lp, token in place] for place in response.top]
    if response.end is not None and response.experts is not None:
        rows = np.maximum(response.experts[:-1], 0)  # zeros in layers without experts
        info["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    if response.end is not None:
        ends = [*starts[1:], len(names)]
        info["weight_versions"] = [
            {"version": names[start], "start": start, "end": end} for start, end in zip(starts, ends, strict=False)
        ]
    return {"text": "", "output_ids": list(response.token_ids), "meta_info": info}


def _finish(response: Response) -> dict[str, Any]:
    match response.end:
        case "stop":
            return {"type": "stop", "matched": response.token_ids[-1]}
        case "length":
            return {"type": "length", "length": len(response.token_ids)}
        case _:
            return {"type": "abort", "message": "Abort by request", "status_code": None, "err_type": None}
