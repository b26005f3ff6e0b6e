"""The real vLLM server on a CPU: the engines' contract over it, twenty updates through a folder, and a tied model."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import SyncError
from gppo_megatron.rollout.engine import Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.fleet import Fleet, Patience
from gppo_megatron.rollout.probe import Probe
from gppo_megatron.rollout.server import Sampled
from gppo_megatron.rollout.vllm import VllmServer
from gppo_megatron.types import Alone
from gppo_megatron.weight_sync.disk import Disk
from gppo_megatron.weight_sync.servers import ToServers
from tests.contract.test_engine import (
    Subject,
    Weights,
    recomputed,
    test_completions_keep_the_order_and_the_limits,  # noqa: F401 - collected here for this engine too
    test_it_refuses_prompts_it_cannot_continue,  # noqa: F401
    test_it_refuses_to_sample_before_the_first_weights,  # noqa: F401
    test_logprobs_are_those_of_the_published_weights,  # noqa: F401
    test_no_requests_give_no_completions,  # noqa: F401
    test_top_tokens_are_those_of_the_published_weights,  # noqa: F401
    test_weights_that_do_not_fit_are_refused,  # noqa: F401
)
from tests.served import CONTEXT, VOCAB
from tests.vllm.vllm_process import vllm_server

pytestmark = pytest.mark.timeout(1200)
PROBED = Request((2, 3, 4), Sampling(0.8, 16, frozenset()), 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("untied")
    create_tiny(TinyModel(tied=False, head_dim=32), path, seed=1)  # vLLM's CPU attention takes heads of 32 and more
    return path


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    tensors = load_file(folder / "model.safetensors")
    return tensors | {"lm_head.weight": tensors["lm_head.weight"] * 8}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    with vllm_server(folder, folder.with_name("untied.log"), CONTEXT) as url:
        yield url


@contextmanager
def subject_of(url: str, folder: Path) -> Iterator[Subject]:
    """A fleet of one server, whose weights are checked by a probe as in a run; the policy is transformers' model."""
    sent: Weights = {}

    def gap(request: Request, sampled: Sampled) -> float:
        expected = recomputed(folder, sent, request, np.array(sampled.token_ids))
        return float(np.abs(np.array(sampled.logprobs) - expected).mean())

    with EventLoop() as loop:
        client = httpx.AsyncClient(timeout=120)
        servers = [VllmServer(url, client, VOCAB)]
        patience = Patience(attempts=3, requests=64, recovery_seconds=0.0)
        fleet = Fleet(servers, loop, lambda name: sync.version_of(name), VOCAB, CONTEXT, patience)
        transport = Disk(folder.with_name(f"{folder.name}-published"), folder, loop)
        probe = Probe(servers, loop, Alone(), PROBED, gap, 1e-4)
        sync = ToServers(servers, transport, loop, Alone(), f"run-{time.time_ns()}", fleet.admit, probe=probe)

        def publish(version: int, weights: object) -> None:
            sent.clear()
            sent.update(weights)  # type: ignore[call-overload]
            sync.publish(version, lambda: iter(sent.items()))

        try:
            yield Subject(fleet, publish)
        finally:
            loop.run(client.aclose())


@pytest.fixture
def subject(server: str, folder: Path) -> Iterator[Subject]:
    with subject_of(server, folder) as subject:
        yield subject


def test_logprobs_agree_after_each_of_20_updates(subject: Subject, folder: Path, weights: Weights) -> None:
    requests = [Request((2 + row, 3, 4), Sampling(0.8, 40, frozenset({1})), row) for row in range(6)]
    generator = torch.Generator().manual_seed(5)
    moving, worst = dict(weights), 0.0
    for version in range(21):
        subject.publish(version, moving.items())
        for request, completion in zip(requests, subject.engine.generate(requests), strict=True):
            assert set(completion.versions.tolist()) == {version}
            expected = recomputed(folder, moving, request, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)
            worst = max(worst, float(np.abs(completion.logprobs - expected).max()))
        moving = {
            name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in moving.items()
        }
    print(f"largest difference of any log-prob in 21 versions: {worst:.1e}")


def test_a_tied_model_ends_the_run_by_the_heads_name(tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    folder.mkdir()
    create_tiny(TinyModel(tied=True, head_dim=32), folder, seed=1)
    moved = {name: tensor * 1.5 for name, tensor in load_file(folder / "model.safetensors").items()}
    with vllm_server(folder, tmp_path / "tied.log", CONTEXT) as url, subject_of(url, folder) as subject:
        with pytest.raises(SyncError) as ending:
            subject.publish(1, moved.items())
        print(ending.value)
        assert "Wrong is lm_head.weight, tied to model.embed_tokens.weight" in str(ending.value)
        assert subject.engine.version == -1
