"""The embedded engine against an oracle that recomputes the whole sequence for every token, one row at a time."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy.stats import chisquare

from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import GppoError, SyncError
from gppo_megatron.rollout.embedded import EmbeddedEngine, cut_batches, draw
from gppo_megatron.rollout.engine import Completion, Request, Sampling
from gppo_megatron.weight_sync.in_process import InProcess

VOCAB = 21
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    create_tiny(TinyModel(), path, seed=1)
    return path


@pytest.fixture(scope="module")
def weights(folder: Path) -> Weights:
    """Larger embeddings than a fresh model's, so that its distributions are far from uniform."""
    tensors = load_file(folder / "model.safetensors")
    return tensors | {"model.embed_tokens.weight": tensors["model.embed_tokens.weight"] * 8}


@pytest.fixture(scope="module")
def oracle(folder: Path, weights: Weights) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(weights, strict=False)
    return model


def engine_of(folder: Path, cache_tokens: int = 4096) -> EmbeddedEngine:
    return EmbeddedEngine(folder, torch.float32, torch.device("cpu"), cache_tokens)


@pytest.fixture(scope="module")
def engine(folder: Path, weights: Weights) -> EmbeddedEngine:
    engine = engine_of(folder)
    engine.load(0, weights.items())
    return engine


def ragged_requests(count: int) -> list[Request]:
    """Rows that differ in all that they may differ in."""
    generator = np.random.default_rng(3)
    requests = []
    for seed in range(count):
        prompt = tuple(int(token) for token in generator.integers(2, VOCAB, generator.integers(1, 14)))
        stops = frozenset(int(token) for token in generator.integers(1, VOCAB, generator.integers(0, 9)))
        sampling = Sampling(float(generator.uniform(0.5, 1.5)), int(generator.integers(1, 13)), stops)
        requests.append(Request(prompt, sampling, seed))
    return requests


def sample_slowly(oracle: torch.nn.Module, request: Request) -> Completion:
    """The same sample by the definition: no cache, no padding, no batch."""
    uniforms = np.random.Generator(np.random.Philox(key=request.seed)).random(request.sampling.max_new_tokens)
    token_ids: list[int] = []
    logprobs: list[float] = []
    for uniform in uniforms:
        with torch.no_grad():
            logits = oracle(torch.tensor([[*request.prompt_ids, *token_ids]])).logits[0, -1].double().numpy()
        scaled = logits / request.sampling.temperature
        probabilities = np.exp(scaled - scaled.max())
        probabilities /= probabilities.sum()
        token = int((probabilities.cumsum() <= uniform).sum())
        token_ids.append(token)
        logprobs.append(float(np.log(probabilities[token])))
        if token in request.sampling.stop_ids:
            break
    finish = "stop" if token_ids[-1] in request.sampling.stop_ids else "length"
    return Completion(
        np.array(token_ids), np.array(logprobs, dtype=np.float32), np.zeros(len(token_ids), dtype=np.int64), finish
    )


def tokens_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def test_samples_and_logprobs_equal_the_definition(engine: EmbeddedEngine, oracle: torch.nn.Module) -> None:
    requests = ragged_requests(48)
    completions = engine.generate(requests)
    expected = [sample_slowly(oracle, request) for request in requests]
    assert tokens_of(completions) == tokens_of(expected)
    assert [completion.finish for completion in completions] == [completion.finish for completion in expected]
    for completion, slow in zip(completions, expected, strict=True):
        np.testing.assert_allclose(completion.logprobs, slow.logprobs, rtol=0, atol=1e-5)
    finishes = [completion.finish for completion in completions]
    assert min(finishes.count("stop"), finishes.count("length")) >= 10


@pytest.mark.parametrize("cache_tokens", [26, 60, 200])
def test_a_sample_does_not_depend_on_its_batch(folder: Path, weights: Weights, cache_tokens: int) -> None:
    requests = ragged_requests(48)
    whole, cut = engine_of(folder), engine_of(folder, cache_tokens)
    whole.load(0, weights.items())
    cut.load(0, weights.items())
    order = np.random.default_rng(0).permutation(len(requests))
    permuted = cut.generate([requests[place] for place in order])
    alone = [whole.generate([request])[0] for request in requests]
    together = whole.generate(requests)
    assert tokens_of(together) == tokens_of(alone)
    assert tokens_of(permuted) == [tokens_of(together)[place] for place in order]


def test_the_cache_stays_within_its_bound_and_shrinks(
    folder: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []

    class Recorded(transformers.DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = super().update(*args, **kwargs)
            shapes.append((keys.shape[0], keys.shape[2]))
            return keys, values

    monkeypatch.setattr(transformers, "DynamicCache", Recorded)
    engine = engine_of(folder, cache_tokens=400)
    engine.load(0, weights.items())
    limits = (1, 2, 20)
    engine.generate([Request((5, 6), Sampling(1.0, limits[row % 3], frozenset()), row) for row in range(18)])
    assert max(rows * length for rows, length in shapes) <= 400
    rows_by_length = {length: rows for rows, length in shapes}
    assert [rows_by_length[length] for length in (2, 3, 4, 21)] == [18, 18, 6, 6]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=40),
    cache_tokens=st.integers(60, 400),
)
def test_batches_hold_every_request_once_within_the_bound(sizes: list[tuple[int, int]], cache_tokens: int) -> None:
    requests = [Request((2,) * prompt, Sampling(1.0, limit, frozenset()), 0) for prompt, limit in sizes]
    batches = cut_batches(requests, cache_tokens)
    assert sorted(row for batch in batches for row in batch) == list(range(len(sizes)))
    for batch in batches:
        prompts, limits = zip(*(sizes[row] for row in batch), strict=True)
        assert len(batch) * (max(prompts) + max(limits)) <= cache_tokens


def test_rows_of_one_size_fill_the_bound() -> None:
    requests = [Request((2, 3), Sampling(1.0, 8, frozenset()), 0)] * 25
    assert [len(batch) for batch in cut_batches(requests, 100)] == [10, 10, 5]


def test_a_batch_owes_nothing_to_the_one_before() -> None:
    sizes = [(1, 9)] * 5 + [(9, 1)] * 5
    requests = [Request((2,) * prompt, Sampling(1.0, limit, frozenset()), 0) for prompt, limit in sizes]
    assert cut_batches(requests, 50) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_request_larger_than_the_cache_is_an_error(folder: Path, weights: Weights) -> None:
    engine = engine_of(folder, cache_tokens=10)
    engine.load(0, weights.items())
    with pytest.raises(ValueError, match=r"needs 11 cached tokens, but rollout.cache_tokens is 10"):
        engine.generate([Request((2, 3, 4), Sampling(1.0, 8, frozenset()), 0)])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_follow_the_tempered_distribution(
    engine: EmbeddedEngine, oracle: torch.nn.Module, temperature: float
) -> None:
    count, prompt = 8000, (5, 12, 7, 16)
    requests = [Request(prompt, Sampling(temperature, 1, frozenset()), seed) for seed in range(count)]
    tokens = np.concatenate([completion.token_ids for completion in engine.generate(requests)])
    observed = np.bincount(tokens, minlength=VOCAB)
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt])).logits[0, -1].double()

    def probability_of_the_counts(at: float) -> float:
        return float(chisquare(observed, (logits / at).softmax(0).numpy() * count).pvalue)

    assert probability_of_the_counts(temperature) > 0.01
    assert probability_of_the_counts(temperature * 1.2) < 1e-6


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    infinity = float("inf")
    logits = torch.tensor([-infinity, 0.0, -infinity, 0.0, -1e4, -infinity]).expand(5, -1)
    uniforms = torch.tensor([0.0, 0.5 - 2**-30, 0.5, 1 - 2**-53, 1.0], dtype=torch.float64)
    drawn = draw(logits, torch.ones(5), uniforms)
    assert drawn.token_ids.tolist() == [1, 1, 3, 3, 3]
    torch.testing.assert_close(drawn.logprobs, torch.full((5,), -np.log(2), dtype=torch.float32))


def test_each_row_has_its_own_stops(engine: EmbeddedEngine) -> None:
    free = Request((5, 12, 7), Sampling(1.0, 12, frozenset()), 11)
    (unstopped,) = engine.generate([free])
    tokens = unstopped.token_ids.tolist()
    assert (len(tokens), unstopped.finish) == (12, "length")
    requests = [replace(free, sampling=Sampling(1.0, 12, frozenset({token}))) for token in range(VOCAB)]
    for token, completion in enumerate(engine.generate([*requests, free])[:-1]):
        length = tokens.index(token) + 1 if token in tokens else 12
        assert completion.token_ids.tolist() == tokens[:length]
        assert completion.finish == ("stop" if token in tokens else "length")
        np.testing.assert_allclose(completion.logprobs, unstopped.logprobs[:length], rtol=0, atol=1e-6)


def test_what_a_finished_row_draws_later_does_not_matter(engine: EmbeddedEngine) -> None:
    neighbours = [Request((5, 12), Sampling(1.0, 12, frozenset()), seed) for seed in range(4)]
    short = Request((5, 12, 7), Sampling(1.0, 1, frozenset()), 11)
    first = int(engine.generate([short])[0].token_ids[0])
    others = replace(short, sampling=Sampling(1.0, 1, frozenset(range(VOCAB)) - {first}))
    completion = engine.generate([others, *neighbours])[0]
    assert (completion.token_ids.tolist(), completion.finish) == ([first], "length")


def test_weights_that_do_not_fit_leave_no_version(folder: Path, weights: Weights) -> None:
    engine = engine_of(folder)
    engine.load(3, weights.items())
    assert engine.version == 3
    norm, ffn = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    wrong = [(name, tensor) for name, tensor in weights.items() if name != norm]
    wrong += [("lm_head.weight", torch.zeros(VOCAB, 64)), (ffn, weights[ffn])]
    wrong = [(name, tensor[:, :8] if name.endswith("0.mlp.up_proj.weight") else tensor) for name, tensor in wrong]
    taken: list[str] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in wrong:
            taken.append(name)
            yield name, tensor

    with pytest.raises(SyncError) as caught:
        engine.load(4, watched())
    assert str(caught.value) == (
        "weights of version 4 do not fit the engine's model: "
        "model.layers.0.mlp.up_proj.weight has shape [192, 8], but the model's is [192, 64]; "
        f"lm_head.weight is unknown; {ffn} came twice; {norm} is missing"
    )
    assert len(taken) == len(wrong)
    assert engine.version == -1
    with pytest.raises(SyncError, match="no weights"):
        engine.generate([Request((2,), Sampling(1.0, 1, frozenset()), 0)])
    engine.load(5, weights.items())
    assert engine.generate([Request((2,), Sampling(1.0, 1, frozenset()), 0)])[0].versions.tolist() == [5]


def test_weights_that_need_gradients_and_break_off_are_handled(folder: Path, weights: Weights) -> None:
    engine = engine_of(folder)
    engine.load(0, ((name, tensor.clone().requires_grad_()) for name, tensor in weights.items()))

    # The copy must not join the policy's graph, which would keep that graph's memory alive.
    assert not any(parameter.requires_grad for parameter in engine._model.parameters())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(weights.items()))
        raise RuntimeError("peer lost")

    with pytest.raises(RuntimeError, match="peer lost"):
        engine.load(1, broken())
    assert engine.version == -1


def test_an_untied_head_is_loaded_by_name(tmp_path: Path) -> None:
    create_tiny(TinyModel(tied=False), tmp_path, seed=4)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    engine = engine_of(tmp_path)
    engine.load(0, tensors.items())
    (completion,) = engine.generate([Request((2, 3), Sampling(0.7, 5, frozenset()), 0)])
    np.testing.assert_allclose(completion.logprobs, -np.log(VOCAB), rtol=1e-6)


def test_publishing_checks_the_version_afterwards(folder: Path, weights: Weights) -> None:
    class Forgetful:
        version = 6

        def load(self, version: int, weights: object) -> None:
            pass

    engine = engine_of(folder)
    InProcess(engine).publish(7, lambda: iter(weights.items()))
    assert engine.version == 7
    with pytest.raises(SyncError, match="holds version 6 .* after version 7"):
        InProcess(Forgetful()).publish(7, lambda: iter(weights.items()))


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_weights_that_give_no_numbers_are_told_of(folder: Path, weights: Weights, damage: float) -> None:
    engine = engine_of(folder)
    name = "model.layers.0.mlp.gate_proj.weight"
    damaged = weights[name].clone()
    damaged[0, 0] = damage
    engine.load(7, (weights | {name: damaged}).items())
    with pytest.raises(GppoError, match="weights of version 7 gives NaN"):
        engine.generate(ragged_requests(5))
