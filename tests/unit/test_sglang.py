"""SGLang's JSON, as a server of release 0.5.23 was seen to write it, and as none may."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from gppo_megatron.build_rollout import until_up
from gppo_megatron.errors import ConfigError, SyncError
from gppo_megatron.rollout.engine import Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.server import GarbledReplyError, RefusedError, Sampled, ServerError, ServerLostError
from gppo_megatron.rollout.sglang import SglangServer, read_reply

URL = "http://server"
REQUEST = Request((2, 3), Sampling(0.5, 40, frozenset({20, 1})), 7)
Answer = Callable[[httpx.Request], httpx.Response]


def piece(tokens: list[int], finish: Any = None, **info: Any) -> dict[str, Any]:
    meta = {
        "id": "x",
        "finish_reason": finish,
        "weight_version": "run.3",
        "output_token_logprobs": [[-0.25 * token, token, None] for token in tokens],
    }
    return {"text": "", "output_ids": tokens, "meta_info": meta | info}


STOP = {"type": "stop", "matched": 20}


def stream(*pieces: dict[str, Any]) -> Answer:
    lines = [f"data: {json.dumps(each)}\n\n" for each in pieces]
    return lambda _: httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    with EventLoop() as loop:
        yield loop


def generated(loop: EventLoop, answer: Answer, grown: Callable[[Sampled], None] = lambda _: None) -> Sampled:
    async def ask() -> Sampled:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await SglangServer(URL, client).generate(REQUEST, "x", grown)

    return loop.run(ask())


def test_a_request_leaves_nothing_to_the_servers_defaults(loop: EventLoop) -> None:
    sent: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append((request.url.path, json.loads(request.content)))
        return stream(piece([20], STOP))(request)

    generated(loop, answer)
    sampling = {
        "temperature": 0.5,
        "max_new_tokens": 40,
        "stop_token_ids": [1, 20],
        "stream_interval": 32,
        "sampling_seed": 7,
    }
    sampling |= {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    body = {"rid": "x", "input_ids": [2, 3], "sampling_params": sampling, "return_logprob": True, "stream": True}
    body["top_logprobs_num"] = 0
    assert sent == [("/generate", body)]


def test_pieces_grow_into_the_whole(loop: EventLoop) -> None:
    grown: list[list[int]] = []
    spans = [{"version": "run.3", "start": 0, "end": 2}, {"version": "run.4", "start": 2, "end": 3}]
    answer = stream(piece([5]), piece([5, 7]), piece([5, 7, 20], STOP, weight_versions=spans))
    sampled = generated(loop, answer, lambda so_far: grown.append(so_far.token_ids))
    assert sampled == Sampled([5, 7, 20], [-1.25, -1.75, -5.0], ["run.3", "run.3", "run.4"], "stop")
    assert grown == [[5], [5, 7], [5, 7, 20]]


def test_pieces_across_a_change_of_weights_are_not_taken_before_the_end_tells_where_it_was(loop: EventLoop) -> None:
    grown: list[list[int]] = []
    answer = stream(piece([5]), piece([5, 7], weight_version="run.4"), piece([5, 7, 8], weight_version="run.4"))
    with pytest.raises(ServerLostError, match="broke off after 3 tokens"):
        generated(loop, answer, lambda so_far: grown.append(so_far.token_ids))
    assert grown == [[5]]


def test_an_aborted_answer_is_a_partial_one(loop: EventLoop) -> None:
    abort = {"type": "abort", "message": "Abort in waiting queue", "status_code": None, "err_type": None}
    assert generated(loop, stream(piece([5], abort))) == Sampled([5], [-1.25], ["run.3"], "abort")


def test_older_answers_without_ids_of_their_own() -> None:
    reply = piece([5, 6], {"type": "length", "length": 2})
    del reply["output_ids"]
    assert read_reply(reply, URL).token_ids == [5, 6]


def refusal(status: int, body: Any) -> Answer:
    return lambda _: httpx.Response(status, text=body if isinstance(body, str) else json.dumps(body))


def broken(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("no news")


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (refusal(400, {"error": {"message": "too long"}}), RefusedError, "HTTP 400: too long"),
        (refusal(400, {"error": "unknown field `bogus`"}), RefusedError, "HTTP 400: unknown field `bogus`"),
        (refusal(429, ""), ServerLostError, "HTTP 429"),
        (refusal(503, "starting"), ServerLostError, "HTTP 503: starting"),
        (stream({"error": {"message": "too long", "code": 400}}), RefusedError, "too long"),
        (stream({"error": {"message": "out of memory", "code": 500}}), ServerLostError, "out of memory"),
        (stream(piece([5])), ServerLostError, "broke off after 1 tokens"),
        (broken, ServerLostError, "ReadTimeout: no news"),
        (lambda _: httpx.Response(200, text="data: {nonsense\n\n"), GarbledReplyError, "is not JSON"),
        (stream({"hello": 1}), GarbledReplyError, "meta_info"),
        (stream(piece([5], {"type": "tired"})), GarbledReplyError, "tired"),
        (stream(piece([5, 6], STOP) | {"output_ids": [5, 7]}), GarbledReplyError, "or of others"),
        (
            stream(piece([5], STOP, output_token_logprobs=[[0.5, 5, None]])),
            GarbledReplyError,
            "a log-prob that is none",
        ),
        (stream(piece([5], STOP, output_token_logprobs=[[None, 5, None]])), GarbledReplyError, "TypeError"),
    ],
)
def test_what_goes_wrong_is_told_apart(loop: EventLoop, answer: Answer, kind: type[ServerError], message: str) -> None:
    with pytest.raises(kind, match=message):
        generated(loop, answer)


def test_the_name_of_the_weights_under_its_new_and_its_old_address(loop: EventLoop) -> None:
    async def name(known: str) -> str:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path != known:
                return httpx.Response(404, text="{}")
            return httpx.Response(200, json={"weight_version": "run.3"})

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await SglangServer(URL, client).weights_name()

    assert [loop.run(name(path)) for path in ("/model_info", "/get_model_info")] == ["run.3", "run.3"]


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [("cpu", 1, {"a": "0"}), ("cpu", 2, {}), ("cuda", 1, {})],
)
def test_checksums_of_a_gpu_or_of_several_ranks_are_not_ours_to_compare(
    loop: EventLoop, device: str, ranks: int, expected: dict[str, str]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"device": device})
        return httpx.Response(200, json={"success": True, "ranks": [{"checksums": {"a": "0"}}] * ranks})

    async def ask() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await SglangServer(URL, client).checksums()

    assert loop.run(ask()) == expected


@pytest.mark.parametrize("ending", [200, 400], ids=["whole", "half"])
def test_an_update_that_was_broken_off_is_ended_before_the_next(loop: EventLoop, ending: int) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if asked == ["/begin_weight_update"]:
            return httpx.Response(400, json={"error": {"message": "begin_weight_update() was already called"}})
        return httpx.Response(ending if request.url.path == "/end_weight_update" else 200, json={"success": True})

    async def begin() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await SglangServer(URL, client).begin_update()

    loop.run(begin())
    assert asked == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


def test_a_router_is_no_server(loop: EventLoop) -> None:
    async def wait(answer: Answer) -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await until_up([SglangServer(URL, client)], 0.0)

    loop.run(wait(refusal(404, {})))
    with pytest.raises(SyncError, match=f"no server answered within 0 s at {URL}; start them"):
        loop.run(wait(refusal(503, "starting")))
    with pytest.raises(ConfigError, match=f"rollout.urls: {URL} is a router"):
        loop.run(wait(refusal(200, {"workers": [{"url": "http://worker"}], "total": 1})))
