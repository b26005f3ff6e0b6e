"""The real SGLang server: the engines' contract over it, weights by every path, and servers that are killed."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import GppoError, SyncError
from gppo_megatron.rollout.engine import Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.fleet import Fleet, Patience
from gppo_megatron.rollout.sglang import SglangServer
from gppo_megatron.types import Alone
from gppo_megatron.weight_sync.disk import Disk
from gppo_megatron.weight_sync.distributed import Broadcast
from gppo_megatron.weight_sync.servers import ToServers, Transport
from gppo_megatron.weight_sync.tensor import InBody
from tests.contract.test_engine import (
    Subject,
    Weights,
    recomputed,
    test_completions_keep_the_order_and_the_limits,  # noqa: F401 - collected here for this engine too
    test_it_refuses_prompts_it_cannot_continue,  # noqa: F401
    test_it_refuses_to_sample_before_the_first_weights,  # noqa: F401
    test_logprobs_are_those_of_the_published_weights,  # noqa: F401
    test_no_requests_give_no_completions,  # noqa: F401
    test_weights_that_do_not_fit_are_refused,  # noqa: F401
)
from tests.served import CONTEXT, VOCAB
from tests.servers.sglang_process import Running, sglang_server

PATIENCE = Patience(attempts=3, requests=64, recovery_seconds=0.0)
ROUNDING = 1e-4
"""Of another library's arithmetic, on any CPU; an update moves some log-prob by a thousand times more."""
WAYS: dict[str, Callable[[Path, EventLoop], Transport]] = {
    "disk": lambda folder, loop: Disk(folder / "published", folder, loop),
    "tensor": lambda folder, loop: InBody(loop, 10_000),
    "distributed": lambda folder, loop: Broadcast("127.0.0.1", "gloo", torch.device("cpu"), loop, 60.0, 10_000),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    create_tiny(TinyModel(tied=False), path, seed=1)
    return path


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    tensors = load_file(folder / "model.safetensors")
    return tensors | {"lm_head.weight": tensors["lm_head.weight"] * 8}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with sglang_server(folder, folder.with_name("sglang.log")) as running:
        yield running


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoop]:
    with EventLoop() as loop:
        yield loop


@contextmanager
def subject_of(way: str, urls: list[str], folder: Path, loop: EventLoop) -> Iterator[Subject]:
    client = httpx.AsyncClient(timeout=120)
    servers = [SglangServer(url, client) for url in urls]
    fleet = Fleet(servers, loop, lambda name: sync.version_of(name), VOCAB, CONTEXT, PATIENCE)
    transport = WAYS[way](folder, loop)
    sync = ToServers(servers, transport, loop, Alone(), f"run-{time.time_ns()}", fleet.admit)
    yield Subject(fleet, lambda version, weights: sync.publish(version, lambda: iter(list(weights))), ROUNDING)
    transport.close(servers)
    loop.run(client.aclose())


@pytest.fixture(params=list(WAYS))
def subject(request: pytest.FixtureRequest, server: Running, folder: Path, loop: EventLoop) -> Iterator[Subject]:
    with subject_of(request.param, [server.url], folder, loop) as subject:
        yield subject


def test_logprobs_agree_after_each_of_20_updates(subject: Subject, folder: Path, weights: Weights) -> None:
    requests = [Request((2 + row, 3, 4), Sampling(0.8, 20, frozenset({1})), row) for row in range(6)]
    generator = torch.Generator().manual_seed(5)
    moving = dict(weights)
    for version in range(21):
        subject.publish(version, moving.items())
        for request, completion in zip(requests, subject.engine.generate(requests), strict=True):
            assert set(completion.versions.tolist()) == {version}
            expected = recomputed(folder, moving, request, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=ROUNDING)
        moving = {
            name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in moving.items()
        }


def again_and_again(act: Callable[[int], object]) -> None:
    for number in range(1, 500):
        act(number)


def test_a_server_killed_while_it_samples(folder: Path, weights: Weights, loop: EventLoop) -> None:
    """The run ends with one line that names the server; nothing hangs."""
    server = sglang_server(folder, folder.with_name("killed.log"))
    with server as running, subject_of("disk", [running.url], folder, loop) as subject:
        subject.publish(0, weights.items())
        requests = [Request((2, 3), Sampling(1.0, 60, frozenset()), row) for row in range(64)]
        threading.Timer(0.3, running.kill).start()
        with pytest.raises(GppoError, match=running.url):
            again_and_again(lambda _: subject.engine.generate(requests))


def test_a_server_killed_while_it_takes_weights(folder: Path, weights: Weights, loop: EventLoop) -> None:
    server = sglang_server(folder, folder.with_name("killed.log"))
    with server as running, subject_of("distributed", [running.url], folder, loop) as subject:
        subject.publish(0, weights.items())
        threading.Timer(0.3, running.kill).start()
        with pytest.raises(SyncError, match=running.url):
            again_and_again(lambda version: subject.publish(version, weights.items()))
