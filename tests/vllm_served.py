"""A stand-in that speaks vLLM's protocol over the embedded engine, as release 0.32.0 was seen to write it."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from gppo_megatron.fused_checksums import fused_checksums
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.rollout.engine import Request, Sampling
from gppo_megatron.rollout.vllm import ID_PREFIX
from gppo_megatron.serving.sampler import Response, Sampler
from gppo_megatron.serving.weights import read_folder
from tests.served import CONTEXT, VOCAB


class StandIn:
    """The routes. A tensor that a folder lacks keeps what it held, and the answer is 200 all the same."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._held: dict[str, torch.Tensor] = {}

    def app(self) -> Starlette:
        @asynccontextmanager
        async def sampling(_: Starlette) -> AsyncIterator[None]:
            task = asyncio.create_task(self._sampler.run())
            yield
            task.cancel()

        posts = {
            "/inference/v1/generate": self.generate,
            "/inference/v1/abort_requests": self.abort,
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.call_workers,
            "/update_weight_version": self.rename,
            "/weight_checker": self.checksums,
        }
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        return Starlette(routes=[*routes, Route("/weight_info", self.info)], lifespan=sampling)

    async def generate(self, http: HttpRequest) -> HttpResponse:
        body = await http.json()
        options = body["sampling_params"]
        assert body["stream"]
        assert options["n"] == 1
        assert all(0 <= token < VOCAB for token in body["token_ids"]), "the real server dies of it"
        assert options["logprobs"] <= VOCAB, "the real server dies of it"
        asked = VOCAB if options["logprobs"] == -1 else max(0, options["logprobs"] - 1)
        stops = frozenset(options["stop_token_ids"])
        sampling = Sampling(options["temperature"], options["max_tokens"], stops, asked)
        response = Response(
            ID_PREFIX + body["request_id"], Request(tuple(body["token_ids"]), sampling, options["seed"])
        )
        self._sampler.submit(response)
        return StreamingResponse(pieces(response), media_type="text/event-stream")

    async def abort(self, http: HttpRequest) -> HttpResponse:
        for name in (await http.json())["request_ids"]:
            self._sampler.abort(name)
        return JSONResponse({"status": "ok"})

    async def pause(self, http: HttpRequest) -> HttpResponse:
        self._sampler.pause(aborting=http.query_params["mode"] == "abort")
        return JSONResponse({"status": "paused"})

    async def resume(self, _: HttpRequest) -> HttpResponse:
        self._sampler.go_on()
        return JSONResponse({"status": "resumed"})

    async def call_workers(self, http: HttpRequest) -> HttpResponse:
        body = await http.json()
        assert body["method"] == "reload_weights"
        self._held |= await asyncio.to_thread(read_folder, Path(body["kwargs"]["weights_path"]))
        await self._sampler.change(self._held, self._sampler.weights)
        return JSONResponse({"results": [None]})

    async def rename(self, http: HttpRequest) -> HttpResponse:
        self._sampler.rename((await http.json())["new_version"])
        return JSONResponse({"success": True})

    async def checksums(self, _: HttpRequest) -> HttpResponse:
        sums = await self._sampler.read(lambda engine: fused_checksums(engine.parameters()))
        return JSONResponse({"checksums": {f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in sums.items()}})

    async def info(self, _: HttpRequest) -> HttpResponse:
        return JSONResponse({"weight_version": self._sampler.weights})


async def pieces(response: Response) -> AsyncIterator[str]:
    """Each holds the tokens since the last one; the last of them names the weights."""
    told = 0
    while True:
        piece = await response.pieces.get()
        last = piece.end is not None and response.pieces.empty()
        tokens = range(told, len(piece.token_ids))
        told = len(piece.token_ids)
        choice = {
            "index": 0,
            "token_ids": [piece.token_ids[place] for place in tokens],
            "logprobs": {"content": [content(piece, place) for place in tokens]},
            "finish_reason": piece.end if last else None,
            "stop_reason": None,
            "routed_experts": None,
            "weight_versions": spans(piece.versions) if last else None,
        }
        yield f"data: {json.dumps({'request_id': piece.name, 'choices': [choice]})}\n\n"
        if last:
            yield "data: [DONE]\n\n"
            return


def content(response: Response, place: int) -> Mapping[str, Any]:
    """The sampled token comes first among the likely ones, whether it is one of them or not."""
    sampled, logprob = response.token_ids[place], response.logprobs[place]
    likely = [(token, value) for value, token in response.top[place]] if response.top else []
    first = [{"token_id": sampled, "logprob": logprob, "rank": 1}]
    top = [{"token_id": token, "logprob": value, "rank": rank} for rank, (token, value) in enumerate(likely, 1)]
    return {"token_id": sampled, "logprob": logprob, "rank": 1, "top_logprobs": first + top}


def spans(versions: list[str]) -> list[dict[str, Any]]:
    starts = [place for place, name in enumerate(versions) if place == 0 or name != versions[place - 1]]
    ends = [*starts[1:], len(versions)]
    return [{"version": versions[start], "start": start, "end": end} for start, end in zip(starts, ends, strict=True)]


@contextmanager
def vllm_served(folder: Path, tokens_a_piece: int = 4) -> Iterator[str]:
    """The URL of a stand-in with the model in `folder`, which holds no weights yet."""
    engine = EmbeddedEngine(folder, torch.float32, torch.device("cpu"), cache_tokens=4096)
    server = uvicorn.Server(
        uvicorn.Config(StandIn(Sampler(engine, CONTEXT, tokens_a_piece)).app(), port=0, log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
