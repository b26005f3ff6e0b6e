"""The experts that an SGLang server reports: read, refused where they cannot be true, and whole after a fault."""

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gppo_megatron.config.architecture import Architecture, Experts, read_architecture
from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import GppoError
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.rollout.engine import Completion, Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.fleet import Fleet, Patience
from gppo_megatron.rollout.reported import experts_of
from gppo_megatron.rollout.sglang import SglangServer, request_body
from gppo_megatron.types import Alone
from gppo_megatron.weight_sync.servers import ToServers
from gppo_megatron.weight_sync.tensor import InBody
from tests.served import CONTEXT, VOCAB, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    create_tiny(TinyModel(layers=3, experts=4, experts_per_token=2), path, seed=1)
    return path


def encoded(rows: Any) -> str:
    return base64.b64encode(np.array(rows, dtype="<i4").tobytes()).decode()


def architecture(folder: Path, dense: Sequence[int] = ()) -> Architecture:
    model = read_architecture(folder)
    assert isinstance(model.experts, Experts)
    return replace(model, experts=replace(model.experts, dense=frozenset(dense)))


ROWS = [[[0, 3], [1, 2], [0, 0]], [[2, 0], [3, 1], [0, 0]]]
"""Of 3 tokens, in a model whose last layer has no experts."""


def test_rows_become_the_form_that_training_reads(folder: Path) -> None:
    read = experts_of(encoded(ROWS), 3, architecture(folder, dense=[2]))
    assert read.dtype == np.int16
    none = [[-1, -1]]
    assert read.tolist() == [row[:2] + none for row in ROWS] + [none * 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (encoded(ROWS[:1]), r"6 experts instead of 2 x 3 x 2"),
        (encoded([[[0, 4]] * 3] * 2), r"an expert that is none of 4"),
        (encoded([[[0, -1]] * 3] * 2), r"an expert that is none of 4"),
        ("no base 64", "base64|padding"),
    ],
)
def test_what_cannot_be_true_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experts_of(text, 3, architecture(folder))


def requests_of(count: int, experts: bool = True) -> list[Request]:
    return [Request((2 + row, 3, 4), Sampling(1.0, 9, frozenset({1}), 0, experts), row) for row in range(count)]


def test_they_are_asked_for_where_a_request_wants_them() -> None:
    plain, asking = (request_body(requests_of(1, experts)[0], "x") for experts in (False, True))
    assert asking == plain | {"return_routed_experts": True}


@contextmanager
def fleet_of(folder: Path, *urls: str) -> Iterator[Fleet]:
    """With the folder's own weights."""
    weights = load_file(folder / "model.safetensors")
    with EventLoop() as loop:
        client = httpx.AsyncClient(timeout=60)
        servers = [SglangServer(url, client, read_architecture(folder)) for url in urls]
        patience = Patience(attempts=4, recovery_seconds=0.0)
        fleet = Fleet(servers, loop, lambda name: sync.version_of(name), VOCAB, CONTEXT, patience)
        sync = ToServers(servers, InBody(loop), loop, Alone(), "run", fleet.admit)
        sync.publish(0, lambda: iter(weights.items()))
        try:
            yield fleet
        finally:
            loop.run(client.aclose())


def expected(folder: Path, request: Request, completion: Completion) -> np.ndarray:
    """Of prompt and response, by the embedded engine, which reads them as one prompt."""
    engine = EmbeddedEngine(folder, torch.float32, torch.device("cpu"), cache_tokens=4096)
    engine.load(0, load_file(folder / "model.safetensors").items())
    whole = request.prompt_ids + tuple(completion.token_ids.tolist())
    (read,) = engine.generate([Request(whole, Sampling(1.0, 1, frozenset(), 0, True), 0)])
    assert read.experts is not None
    return read.experts


@pytest.mark.parametrize("fault", ["", "dropped:3:2"], ids=["healthy", "taken up again"])
def test_a_served_response_has_the_experts_of_all_its_tokens(folder: Path, fault: str) -> None:
    faults = [fault] if fault else []
    with served(folder, *faults, tokens_a_piece=4) as url, fleet_of(folder, url) as fleet:
        requests = requests_of(6)
        for request, completion in zip(requests, fleet.generate(requests), strict=True):
            assert completion.experts is not None
            assert completion.experts.shape == (3 + len(completion.token_ids), 3, 2)
            read = expected(folder, request, completion)
            assert completion.experts[:-1].tolist() == read[: len(completion.experts) - 1].tolist()
            assert (completion.experts[-1] == -1).all()
        assert [each.experts for each in fleet.generate(requests_of(2, experts=False))] == [None, None]


def test_a_response_whose_last_piece_is_lost_is_ended_by_another_request(folder: Path) -> None:
    """All tokens came, but not their experts: one token less is kept."""
    asked: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return httpx.Response(200, json={"weight_version": "run.0"})
        body = json.loads(request.content)
        asked.append(body["sampling_params"]["max_new_tokens"])
        first = len(asked) == 1
        tokens = [5, 6, 7][: body["sampling_params"]["max_new_tokens"]]
        info: dict[str, Any] = {
            "finish_reason": None if first else {"type": "length", "length": len(tokens)},
            "weight_version": "run.0",
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        }
        if not first:
            rows = len(body["input_ids"]) + len(tokens) - 1
            info["routed_experts"] = encoded(np.tile([[[0, 1]] * 3], (rows, 1, 1)))
        return httpx.Response(200, text=f"data: {json.dumps({'output_ids': tokens, 'meta_info': info})}\n\n")

    with EventLoop() as loop:
        client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        server = SglangServer("http://a", client, read_architecture(folder))
        fleet = Fleet([server], loop, lambda name: 0, VOCAB, CONTEXT, Patience(attempts=3))
        fleet.admit(0, {})
        (completion,) = fleet.generate([Request((2, 3), Sampling(1.0, 3, frozenset(), 0, True), 0)])
        loop.run(client.aclose())
    assert asked == [3, 1]
    assert completion.token_ids.tolist() == [5, 6, 5]
    assert completion.experts is not None
    assert completion.experts.shape == (5, 3, 2)


def test_a_server_without_the_flag_is_told_its_name(folder: Path, tmp_path: Path) -> None:
    create_tiny(TinyModel(layers=3), tmp_path, seed=1)  # as a server of a dense model, it sends none
    with served(tmp_path) as url, EventLoop() as loop:
        client = httpx.AsyncClient(timeout=60)
        server = SglangServer(url, client, read_architecture(folder))
        fleet = Fleet([server], loop, lambda name: 0, VOCAB, CONTEXT, Patience(attempts=3))
        httpx.post(f"{url}/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": "w"})
        fleet.admit(0, {})
        with pytest.raises(GppoError, match=r"start the server with --enable-return-routed-experts$"):
            fleet.generate(requests_of(1))
        loop.run(client.aclose())
