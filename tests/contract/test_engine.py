"""What every Engine promises. A new engine joins by one entry in SUBJECTS."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

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

VOCAB = 21
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """An engine without weights, and how weights reach it."""

    engine: Engine
    publish: Callable[[int, Iterable[tuple[str, torch.Tensor]]], None]


def embedded(folder: Path) -> Subject:
    engine = EmbeddedEngine(folder, torch.float32, torch.device("cpu"), cache_tokens=128)
    return Subject(engine, engine.load)


SUBJECTS = {"embedded": embedded}


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
def subject(request: pytest.FixtureRequest, folder: Path) -> Subject:
    return SUBJECTS[request.param](folder)


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
    """Log-probs of the sampled tokens by one forward pass of transformers over the whole sequence."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    model.load_state_dict(weights, strict=False)
    sequence = torch.tensor([*request.prompt_ids, *token_ids.tolist()])
    with torch.no_grad():
        logprobs = (model(sequence[None]).logits[0] / request.sampling.temperature).log_softmax(-1)
    predicted = logprobs[len(request.prompt_ids) - 1 : -1].gather(1, torch.from_numpy(token_ids)[:, None])
    return predicted[:, 0].numpy()


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
            assert completion.version == version
            expected = recomputed(folder, published, request, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-5)


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
