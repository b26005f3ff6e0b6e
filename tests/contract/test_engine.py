"""What every Engine promises. A new engine joins by one entry in SUBJECTS."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import SyncError
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.rollout.engine import Engine, Request, Sampling
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.fleet import Fleet, Patience
from gppo_megatron.rollout.sglang import SglangServer
from gppo_megatron.rollout.vllm import VllmServer
from gppo_megatron.types import Alone
from gppo_megatron.weight_sync.disk import Disk
from gppo_megatron.weight_sync.distributed import Broadcast
from gppo_megatron.weight_sync.servers import ToServers, Transport
from gppo_megatron.weight_sync.tensor import InBody
from tests.served import CONTEXT, VOCAB, served, serving_process
from tests.vllm_served import vllm_served

Weights = dict[str, torch.Tensor]
Way = Callable[[Path, EventLoop], Transport]


@dataclass(frozen=True)
class Subject:
    """An engine without weights, and how weights reach it. rounding: how far its log-probs may be off, in nats."""

    engine: Engine
    publish: Callable[[int, Iterable[tuple[str, torch.Tensor]]], None]
    rounding: float = 1e-5


@contextmanager
def embedded(folder: Path) -> Iterator[Subject]:
    engine = EmbeddedEngine(folder, torch.float32, torch.device("cpu"), cache_tokens=128)
    yield Subject(engine, engine.load)


@contextmanager
def over_http(
    folder: Path, urls: Sequence[str], transport: Way, server: Callable[[str, httpx.AsyncClient], Any] = SglangServer
) -> Iterator[Subject]:
    """A fleet over servers, and one way to carry weights."""
    with EventLoop() as loop:
        client = httpx.AsyncClient(timeout=60)
        servers = [server(url, client) for url in urls]
        fleet = Fleet(servers, loop, lambda name: sync.version_of(name), VOCAB, CONTEXT, Patience())
        way = transport(folder, loop)
        sync = ToServers(servers, way, loop, Alone(), "run", fleet.admit)
        try:
            yield Subject(fleet, lambda version, weights: sync.publish(version, lambda: iter(list(weights))))
        finally:
            way.close(servers)
            loop.run(client.aclose())


@contextmanager
def two_served(folder: Path, transport: Way) -> Iterator[Subject]:
    with served(folder) as one, served(folder) as two, over_http(folder, (one, two), transport) as subject:
        yield subject


@contextmanager
def two_of_vllm(folder: Path) -> Iterator[Subject]:
    server = partial(VllmServer, vocab=VOCAB)
    with (
        vllm_served(folder) as one,
        vllm_served(folder) as two,
        over_http(folder, (one, two), by_disk, server) as subject,
    ):
        yield subject


class _OneProcess:
    """A server process that starts when it is first asked for."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._url: str | None = None

    def url(self, folder: Path) -> str:
        if self._url is None:
            self._url = self._open.enter_context(serving_process(folder)).url
        return self._url

    def close(self) -> None:
        self._open.close()
        self._url = None


SERVER_PROCESS = _OneProcess()


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    SERVER_PROCESS.close()


@contextmanager
def by_broadcast(folder: Path) -> Iterator[Subject]:
    """Group members are processes: the server is one of its own, the same for all tests."""

    def transport(_: Path, loop: EventLoop) -> Transport:
        return Broadcast("127.0.0.1", "gloo", torch.device("cpu"), loop, 30.0, bucket_bytes=10_000)

    with over_http(folder, (SERVER_PROCESS.url(folder),), transport) as subject:
        yield subject


def by_disk(folder: Path, loop: EventLoop) -> Transport:
    return Disk(folder / "published", folder, loop)


def in_body(folder: Path, loop: EventLoop) -> Transport:
    return InBody(loop, bucket_bytes=10_000)


SUBJECTS = {
    "embedded": embedded,
    "disk": partial(two_served, transport=by_disk),
    "tensor": partial(two_served, transport=in_body),
    "broadcast": by_broadcast,
    "vllm": two_of_vllm,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    create_tiny(TinyModel(), path, seed=1)
    return path


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    tensors = load_file(folder / "model.safetensors")
    return tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"] * 8}


@pytest.fixture(params=list(SUBJECTS))
def subject(request: pytest.FixtureRequest, folder: Path) -> Iterator[Subject]:
    with SUBJECTS[request.param](folder) as subject:
        yield subject


def requests_of(count: int) -> list[Request]:
    """Prompts of 1 to 5 tokens; temperatures, limits and stops differ."""
    return [
        Request(
            prompt_ids=tuple(2 + (row + place) % 19 for place in range(1 + row % 5)),
            sampling=Sampling((0.7, 1.0, 1.3)[row % 3], 1 + row % 7, frozenset({1, 2 + row % 19})),
            seed=row,
        )
        for row in range(count)
    ]


def recomputed(folder: Path, weights: Weights, request: Request, token_ids: np.ndarray) -> np.ndarray:
    """Log-probs of the sampled tokens."""
    logprobs = distribution(folder, weights, request, token_ids)
    return logprobs.gather(1, torch.from_numpy(token_ids)[:, None])[:, 0].numpy()


def distribution(folder: Path, weights: Weights, request: Request, token_ids: np.ndarray) -> torch.Tensor:
    """[n, vocabulary], at each sampled token, by one forward pass of transformers over the whole sequence."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    model.load_state_dict(weights, strict=False)
    sequence = torch.tensor([*request.prompt_ids, *token_ids.tolist()])
    with torch.no_grad():
        logprobs = (model(sequence[None]).logits[0] / request.sampling.temperature).log_softmax(-1)
    return logprobs[len(request.prompt_ids) - 1 : -1]


def test_it_refuses_to_sample_before_the_first_weights(subject: Subject) -> None:
    assert subject.engine.version == -1
    with pytest.raises(SyncError):
        subject.engine.generate(requests_of(1))


def test_completions_keep_the_order_and_the_limits(subject: Subject, weights: Weights) -> None:
    subject.publish(0, weights.items())
    requests = requests_of(30)
    completions = subject.engine.generate(requests)
    assert len(completions) == len(requests)
    for request, completion in zip(requests, completions, strict=True):
        tokens = completion.token_ids.tolist()
        assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int64, np.float32)
        assert len(tokens) == len(completion.logprobs)
        assert all(0 <= token < VOCAB for token in tokens)
        assert not set(tokens[:-1]) & request.sampling.stop_ids
        stopped = tokens[-1] in request.sampling.stop_ids
        assert completion.finish == ("stop" if stopped else "length")
        assert 1 <= len(tokens) <= request.sampling.max_new_tokens
        assert stopped or len(tokens) == request.sampling.max_new_tokens


def test_logprobs_are_those_of_the_published_weights(subject: Subject, folder: Path, weights: Weights) -> None:
    other = {name: tensor * 1.3 for name, tensor in weights.items()}
    requests = requests_of(8)
    for version, published in ((0, weights), (5, other)):
        subject.publish(version, published.items())
        assert subject.engine.version == version
        for request, completion in zip(requests, subject.engine.generate(requests), strict=True):
            assert set(completion.versions.tolist()) == {version}
            expected = recomputed(folder, published, request, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=subject.rounding)


ONLY_EMBEDDED = pytest.mark.parametrize("subject", ["embedded"], indirect=True)
"""Servers take requests one by one."""


@pytest.mark.parametrize("count", [1, 5, VOCAB + 3])
def test_top_tokens_are_those_of_the_published_weights(
    subject: Subject, folder: Path, weights: Weights, count: int
) -> None:
    subject.publish(0, weights.items())
    requests = [replace(r, sampling=replace(r.sampling, top_tokens=count)) for r in requests_of(8)]
    plain = subject.engine.generate(requests_of(8))
    for request, completion, other in zip(requests, subject.engine.generate(requests), plain, strict=True):
        assert completion.token_ids.tolist() == other.token_ids.tolist()
        assert other.top is None
        top = completion.top
        assert top is not None
        assert top.ids.shape == (len(completion.token_ids), count)
        logprobs = distribution(folder, weights, request, completion.token_ids)
        expected = logprobs.topk(min(count, VOCAB), dim=1)
        assert top.ids[:, :VOCAB].tolist() == expected.indices.tolist()
        assert (top.ids[:, VOCAB:] == -1).all()
        np.testing.assert_allclose(top.logprobs[:, :VOCAB], expected.values, rtol=0, atol=1e-5)
        taken = torch.cat([expected.indices, torch.from_numpy(completion.token_ids)[:, None]], dim=1)
        rest = logprobs.scatter(1, taken, -torch.inf).logsumexp(1)
        np.testing.assert_allclose(np.exp(top.rest), rest.exp(), rtol=0, atol=1e-6)
        assert (top.rest == -np.inf).all() == (count > VOCAB)


@ONLY_EMBEDDED
def test_one_batch_has_one_number_of_top_tokens(subject: Subject, weights: Weights) -> None:
    subject.publish(0, weights.items())
    requests = [Request((3,), Sampling(1.0, 2, frozenset(), top_tokens=count), 0) for count in (1, 2)]
    with pytest.raises(ValueError, match=r"different numbers of top tokens: \[1, 2\]"):
        subject.engine.generate(requests)


def test_equal_seeds_give_equal_samples_whatever_the_batch(subject: Subject, weights: Weights) -> None:
    subject.publish(0, weights.items())
    requests = requests_of(20)
    first = [completion.token_ids.tolist() for completion in subject.engine.generate(requests)]
    again = [completion.token_ids.tolist() for completion in subject.engine.generate(requests[::-1])][::-1]
    assert first == again
    reseeded = subject.engine.generate([replace(request, seed=request.seed + 1000) for request in requests])
    assert [completion.token_ids.tolist() for completion in reseeded] != first


def test_no_requests_give_no_completions(subject: Subject, weights: Weights) -> None:
    subject.publish(0, weights.items())
    assert subject.engine.generate([]) == []


@pytest.mark.parametrize("prompt", [(), (VOCAB,), (3, -1)])
def test_it_refuses_prompts_it_cannot_continue(subject: Subject, weights: Weights, prompt: tuple[int, ...]) -> None:
    subject.publish(0, weights.items())
    with pytest.raises(ValueError, match="token"):
        subject.engine.generate([Request(prompt, Sampling(1.0, 2, frozenset()), 0)])


def test_weights_that_do_not_fit_are_refused(subject: Subject, weights: Weights) -> None:
    subject.publish(0, weights.items())
    with pytest.raises(SyncError, match=r"model\.norm\.weight"):
        subject.publish(1, [pair for pair in weights.items() if pair[0] != "model.norm.weight"])
    assert subject.engine.version == -1
