"""vLLM's JSON, as a server of release 0.32.0 was seen to write it, and as none may."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file

from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import SyncError
from gppo_megatron.rollout.engine import Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.probe import Probe
from gppo_megatron.rollout.server import GarbledReplyError, RefusedError, Sampled, ServerError, ServerLostError
from gppo_megatron.rollout.vllm import VllmServer, request_body
from gppo_megatron.types import Alone
from gppo_megatron.weight_sync.disk import Disk
from gppo_megatron.weight_sync.servers import ToServers

URL = "http://server"
REQUEST = Request((2, 3, 4), Sampling(0.7, 6, frozenset({20, 1}), top_tokens=2), 7)
Answer = Callable[[httpx.Request], httpx.Response]
RECORDED = json.loads(Path("tests/data/vllm_tied.json").read_text())


def piece(tokens: Sequence[int], end: str | None = None, versions: Any = None, **changed: Any) -> dict[str, Any]:
    content = [
        {
            "token_id": token,
            "logprob": -0.25 * token,
            "rank": 4,
            "top_logprobs": [{"token_id": token, "logprob": -0.25 * token, "rank": 4}]
            + [{"token_id": top, "logprob": -0.1 * top, "rank": rank} for rank, top in enumerate((6, 7), 1)],
        }
        for token in tokens
    ]
    choice = {"index": 0, "finish_reason": end, "stop_reason": None, "token_ids": list(tokens)}
    choice |= {"routed_experts": None, "sampling_mask": None, "weight_versions": versions}
    return {"request_id": "generate-tokens-x", "choices": [choice | {"logprobs": {"content": content}} | changed]}


def spans(*versions: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in versions]


def stream(*pieces: dict[str, Any]) -> Answer:
    lines = [f"data: {json.dumps(each)}\n\n" for each in pieces]
    return lambda _: httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    with EventLoop() as loop:
        yield loop


def asked(loop: EventLoop, answer: Answer, ask: Callable[[VllmServer], Any]) -> Any:
    async def work() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await ask(VllmServer(URL, client, 21))

    return loop.run(work())


def generated(
    loop: EventLoop, answer: Answer, request: Request = REQUEST, grown: Callable[[Sampled], None] = lambda _: None
) -> Sampled:
    sampled: Sampled = asked(loop, answer, lambda server: server.generate(request, "x", grown))
    return sampled


def test_a_request_leaves_nothing_to_the_servers_defaults(loop: EventLoop) -> None:
    sent: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append((request.url.path, json.loads(request.content)))
        return stream(piece([20], "stop", spans(("run.3", 0, 1))))(request)

    generated(loop, answer)
    sampling = {
        "n": 1,
        "temperature": 0.7,
        "max_tokens": 6,
        "min_tokens": 0,
        "stop_token_ids": [1, 20],
        "ignore_eos": True,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 3,
        "seed": 7,
        "detokenize": False,
    }
    body = {"request_id": "x", "token_ids": [2, 3, 4], "sampling_params": sampling, "stream": True}
    assert sent == [("/inference/v1/generate", body)]


@pytest.mark.parametrize(("top", "asked_for"), [(0, 0), (1, 2), (20, 21), (21, -1)])
def test_more_log_probs_than_there_are_tokens_are_never_asked_for(top: int, asked_for: int) -> None:
    request = Request((2,), Sampling(1.0, 4, frozenset(), top_tokens=top), 0)
    assert request_body(request, "x", 21)["sampling_params"]["logprobs"] == asked_for


def test_pieces_add_up_and_the_last_names_the_weights(loop: EventLoop) -> None:
    versions = spans(("run.3", 0, 2), ("run.4", 2, 3))
    sampled = generated(loop, stream(piece([5]), piece([7]), piece([20], "stop", versions)))
    assert (sampled.token_ids, sampled.logprobs) == ([5, 7, 20], [-1.25, -1.75, -5.0])
    assert (sampled.versions, sampled.end) == (["run.3", "run.3", "run.4"], "stop")
    assert sampled.top[0] == {5: -1.25, 6: pytest.approx(-0.6), 7: pytest.approx(-0.7)}


def test_an_aborted_answer_is_a_partial_one(loop: EventLoop) -> None:
    sampled = generated(loop, stream(piece([5]), piece([], "abort", spans(("run.3", 0, 1)))))
    assert (sampled.token_ids, sampled.versions, sampled.end) == ([5], ["run.3"], "abort")


@pytest.mark.parametrize(("names", "kept"), [(["run.3", "run.3"], 32), (["run.3", "run.4"], None)])
def test_a_long_answer_that_breaks_off_is_kept_where_its_weights_are_known(
    loop: EventLoop, names: list[str], kept: int | None
) -> None:
    told: list[Sampled] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/weight_info":
            return httpx.Response(200, json={"weight_version": names.pop(0)})
        return stream(*(piece([5]) for _ in range(40)))(request)

    request = Request((2,), Sampling(1.0, 100, frozenset()), 0)
    with pytest.raises(ServerLostError, match="broke off after 40 tokens"):
        generated(loop, answer, request, told.append)
    assert [(len(sampled.token_ids), set(sampled.versions)) for sampled in told] == (
        [(kept, {"run.3"})] if kept else []
    )


def refusal(status: int, body: Any) -> Answer:
    return lambda _: httpx.Response(status, json=body)


STOP = spans(("run.3", 0, 1))


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (refusal(403, {"error": {"message": "use --enable-scale-out", "code": 403}}), RefusedError, "scale-out"),
        (refusal(500, {"error": {"message": "engine dead", "code": 500}}), ServerLostError, "engine dead"),
        (stream({"error": {"message": "engine dead", "code": 500}}), ServerLostError, "engine dead"),
        (stream({"error": {"message": "too long", "code": 400}}), RefusedError, "too long"),
        (stream(piece([5])), ServerLostError, "broke off after 1 tokens"),
        (stream({"hello": 1}), GarbledReplyError, "choices"),
        (stream(piece([5], "tired", STOP)), GarbledReplyError, "tired"),
        (stream(piece([5], "stop", None)), GarbledReplyError, "named of 0 tokens, but 1"),
        (stream(piece([5], "stop", spans(("a", 0, 2)))), GarbledReplyError, "named of 2 tokens, but 1"),
        (stream(piece([5], "stop", STOP, token_ids=[6])), GarbledReplyError, "or of others"),
        (stream(piece([-4], "stop", STOP)), GarbledReplyError, "a log-prob that is none: 1.0"),
        (stream(piece([4 * 9999], "stop", STOP)), GarbledReplyError, r"a log-prob that is none: -9999\.0"),
    ],
)
def test_what_goes_wrong_is_told_apart(loop: EventLoop, answer: Answer, kind: type[ServerError], message: str) -> None:
    with pytest.raises(kind, match=message):
        generated(loop, answer)


def test_a_server_out_of_development_mode_is_told_what_it_lacks(loop: EventLoop) -> None:
    missing = refusal(404, {"detail": "Not Found"})
    for ask in (lambda server: server.weights_name(), lambda server: server.pause()):
        with pytest.raises(RefusedError, match="HTTP 404.*VLLM_SERVER_DEV_MODE=1"):
            asked(loop, missing, ask)


@pytest.mark.parametrize(
    "ask",
    [
        lambda server: server.begin_update(),
        lambda server: server.load_tensors(b"", "run.1"),
        lambda server: server.receive([], "group", "run.1"),
    ],
)
def test_other_ways_for_the_weights_are_refused(loop: EventLoop, ask: Callable[[VllmServer], Any]) -> None:
    with pytest.raises(RefusedError, match=r"set rollout\.sync to disk"):
        asked(loop, stream(), ask)


@pytest.mark.parametrize(("ranks", "told"), [(1, 10), (2, 0)])
def test_checksums_of_parameters_that_lie_whole_on_one_rank(loop: EventLoop, ranks: int, told: int) -> None:
    sums = {
        name.replace("tp0", f"tp{rank}"): digest
        for name, digest in RECORDED["weight_checker"]["checksums"].items()
        for rank in range(ranks)
    }
    held = asked(loop, lambda _: httpx.Response(200, json={"checksums": sums}), lambda server: server.checksums())
    assert len(held) == told
    assert told == 0 or held["model.norm.weight"] == sums["dp0:pp0:pcp0:tp0:model.norm.weight"][:16]


def reloaded(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that the recorded server was told to load; those it began with are in `folder`."""
    create_tiny(TinyModel(tied=True, hidden=64, head_dim=32), folder, seed=1)
    return {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


def logprobs(folder: Path, weights: dict[str, torch.Tensor], head: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Of the sampled tokens, under `weights` with this head."""
    config = transformers.AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(weights | {"lm_head.weight": head})
    with torch.no_grad():
        logits = model(torch.tensor([[*REQUEST.prompt_ids, *tokens]])).logits[0] / REQUEST.sampling.temperature
    rows = logits.log_softmax(-1)[len(REQUEST.prompt_ids) - 1 : -1]
    of_tokens: torch.Tensor = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return of_tokens


def test_a_tied_head_that_stays_behind_ends_the_run_by_its_name(tmp_path: Path, loop: EventLoop) -> None:
    """Answers of a real server: HTTP 200 throughout, and every checksum it tells is right."""
    folder = tmp_path / "model"
    folder.mkdir()
    weights = reloaded(folder)
    choice = RECORDED["choice"]
    recorded = torch.tensor([each["logprob"] for each in choice["logprobs"]["content"]])
    old_head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(recorded, logprobs(folder, weights, old_head, choice["token_ids"]), rtol=0, atol=1e-5)
    named = {"weight_version": "default"}

    def answer(request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/inference/v1/generate":
                return stream({"choices": [choice]})(request)
            case "/update_weight_version":
                named["weight_version"] = json.loads(request.content)["new_version"]
                return httpx.Response(200, json={"success": True})
            case "/weight_checker":
                return httpx.Response(200, json=RECORDED["weight_checker"])
            case "/weight_info":
                return httpx.Response(200, json=named)
        assert request.url.path in {"/pause", "/resume", "/collective_rpc"}
        return httpx.Response(200, json={"status": "paused"})

    def gap(request: Request, sampled: Sampled) -> float:
        expected = logprobs(folder, weights, weights["model.embed_tokens.weight"], sampled.token_ids)
        return float((torch.tensor(sampled.logprobs) - expected).abs().mean())

    async def client() -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(answer))

    server = VllmServer(URL, loop.run(client()), 21)
    probe = Probe([server], loop, Alone(), REQUEST, gap, 1e-4)
    transport = Disk(tmp_path / "published", folder, loop)
    refused: list[Any] = []
    sync = ToServers([server], transport, loop, Alone(), "run", lambda *told: refused.append(told), probe=probe)
    with pytest.raises(SyncError, match=r"differ by 0\.099 on average.*Wrong is lm_head\.weight, tied to"):
        sync.publish(1, lambda: iter(weights.items()))
    assert set(refused[-1][1]) == {URL}
    loop.run(server.client.aclose())
