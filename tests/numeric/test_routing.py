"""Replayed routing: the policy's tokens go to the experts that the sampler sent them to.

The sampler's and the policy's routers differ by so little that probabilities are the same in float32's sixth digit, but
all experts are nearly as likely, so the two choose different ones: what happens to a few tokens in a real model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gppo_verifiers.types import Answer, Status, Task, Verdict

from gppo_megatron.config.schema import Memory
from gppo_megatron.data.packing import Packer, filler
from gppo_megatron.errors import GppoError
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.arrangement import Arrangement, EndToEnd, Shares, SideBySide
from gppo_megatron.policy.megatron.routing import ReplayedRouting
from gppo_megatron.policy.megatron.update import MegatronPolicy
from gppo_megatron.rollout.collect import Collector
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.rollout.engine import Request, Sampling
from gppo_megatron.types import Alone, Group, MicroBatch, Prompt, TrainBatch
from tests.distributed.layouts import OPTIMIZER, TEMPERATURE, advantage_of
from tests.distributed.reference import (
    VOCAB,
    aggregate,
    assert_close,
    from_folder,
    gppo_losses,
    named,
    random_model,
    relative,
)
from tests.numeric.test_policy import exported_gradients
from tests.single_process import CPU, model_of, world_of_one

GPPO = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
SAMPLING = Sampling(TEMPERATURE, 9, frozenset({1, 2, 3}), experts=True)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


class Models:
    """folders: of the sampler's and of the policy's model, which differ in their routers alone."""

    def __init__(self, root: Path, normalized: bool) -> None:
        config = transformers.Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
            mlp_only_layers=[1], norm_topk_prob=normalized,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15, generator=generator)
        self.folders = [root / "sampler", root / "policy"]
        routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        alike = [router.weight[:1].detach().clone() for router in routers]
        for folder in self.folders:
            with torch.no_grad():
                for router, row in zip(routers, alike, strict=True):
                    router.weight.copy_(row + 2e-7 * torch.randn(router.weight.shape, generator=generator))
            model.save_pretrained(folder)


@pytest.fixture(scope="module", params=[True, False], ids=["normalized", "as they are"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), request.param)


class Coin:
    """A verdict that is arithmetic of the answer."""

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [Verdict(float(sum(map(ord, answer.text)) % 2), Status.GRADED) for answer in answers]

    def close(self) -> None:
        pass


def engine_of(folder: Path) -> EmbeddedEngine:
    engine = EmbeddedEngine(folder, torch.float32, CPU, cache_tokens=150)
    engine.load(0, named(dict(from_folder(folder).named_parameters())).items())
    return engine


def sampled(folder: Path) -> list[Group]:
    random = np.random.default_rng(2)
    prompts = [
        Prompt(str(place), tuple(map(int, random.integers(2, VOCAB, random.integers(1, 12)))), Task("none"))
        for place in range(6)
    ]
    collector = Collector(engine_of(folder), Coin(), SAMPLING, str, 4, seed=1)
    return collector.collect(prompts, range(len(prompts)), 0, StepMetrics())


def packed(groups: Sequence[Group]) -> TrainBatch:
    advantages = [[advantage_of(trajectory) for trajectory in group.trajectories] for group in groups]
    (batch,) = Packer(1, 80, "token_mean", None, Alone()).pack(groups, advantages)
    assert len(batch.micro_batches) >= 4
    return batch


def gap(policy: MegatronPolicy, batch: TrainBatch) -> float:
    """Largest distance of the policy's log-probs from the sampler's, in nats."""
    scored = policy.annotate(batch)
    return max(
        float((micro.anchor_logprobs_T - micro.sampler_logprobs_T).abs().max()) for micro in scored.micro_batches
    )


@pytest.mark.parametrize("arrange", [EndToEnd, SideBySide])
def test_replayed_routing_gives_the_samplers_log_probs(models: Models, arrange: type[Arrangement]) -> None:
    sampler, policy = models.folders
    batch = packed(sampled(sampler))
    model = model_of(policy, TEMPERATURE, arrange=arrange, replay=True)
    assert gap(MegatronPolicy(model.replaying(), OPTIMIZER, 10), batch) <= 1e-5
    assert gap(MegatronPolicy(model, OPTIMIZER, 10), batch) > 0.1, "own routing must differ, or nothing is shown"
    assert gap(MegatronPolicy(model.replaying(), OPTIMIZER, 10), batch) <= 1e-5


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_gradient_goes_through_the_routers_probabilities_of_the_replayed_experts(
    models: Models, recompute: str
) -> None:
    sampler, policy = models.folders
    groups = sampled(sampler)
    hf = from_folder(policy)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    aggregate(list(gppo_losses(hf, trajectories)), "token_mean", None).backward()
    theirs = named({name: weight.grad for name, weight in hf.named_parameters() if weight.grad is not None})

    memory = Memory(recompute=recompute)  # type: ignore[arg-type]
    model = model_of(policy, TEMPERATURE, memory=memory, replay=True)
    MegatronPolicy(model.replaying(), replace(OPTIMIZER, clip_grad=0.0), 10).update(packed(groups), GPPO)
    ours = {name: tensor.clone() for name, tensor in exported_gradients(model).items()}
    assert_close(ours, theirs, 2e-5)
    router = "model.layers.2.mlp.gate.weight"
    assert theirs[router].abs().max() > 1e-4

    other = model_of(policy, TEMPERATURE)
    MegatronPolicy(other, replace(OPTIMIZER, clip_grad=0.0), 10).update(packed(groups), GPPO)
    assert relative(exported_gradients(other)[router], theirs[router]) > 1e-2


def test_the_engine_says_where_every_token_went(tmp_path: Path) -> None:
    """As one forward pass of the whole sequence through transformers has it; prompts of several lengths a batch."""
    random_model("qwen3_moe", tied=False).save_pretrained(tmp_path)
    hf = from_folder(tmp_path)
    for group in sampled(tmp_path):
        for trajectory in group.trajectories:
            assert trajectory.experts is not None
            assert (trajectory.experts.dtype, trajectory.experts.shape[1:]) == (np.int16, (2, 2))
            seen: list[torch.Tensor] = []
            hooks = [layer.mlp.gate.register_forward_hook(partial(_keep, seen)) for layer in hf.model.layers]
            with torch.no_grad():
                hf(torch.from_numpy(trajectory.token_ids)[None])
            for hook in hooks:
                hook.remove()
            chosen = torch.stack(seen, dim=1).sort(dim=2).values
            assert np.sort(trajectory.experts[:-1], axis=2).tolist() == chosen[:-1].tolist()
            assert (trajectory.experts[-1] == -1).all()


def _keep(seen: list[torch.Tensor], router: object, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
    seen.append(outputs[2])


def test_who_cannot_report_experts_says_so(tmp_path: Path) -> None:
    random_model("qwen3", tied=True).save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="model without experts cannot report"):
        engine_of(tmp_path / "dense").generate([Request((3,), SAMPLING, 1)])
    random_model("qwen3_moe", tied=True).save_pretrained(tmp_path / "sparse")
    requests = [Request((3,), replace(SAMPLING, experts=asked), 1) for asked in (True, False)]
    with pytest.raises(ValueError, match="some requests of one batch ask"):
        engine_of(tmp_path / "sparse").generate(requests)


@dataclass(frozen=True)
class Four:
    """Experts, as far as replay asks."""

    count: int = 4
    per_token: int = 2


def micro_batch(experts: Sequence[Sequence[int]] | None) -> MicroBatch:
    """Two sequences of 3 and 2 tokens; experts: of each token, in the second of two layers, the first being dense."""
    zero, count = torch.zeros(5), 5
    tokens = torch.arange(count)
    mask = torch.tensor([True, True, False, True, False])
    given = None
    if experts is not None:
        given = torch.stack([torch.full((count, 2), -1), torch.tensor(experts)], dim=1).to(torch.int16)
    return MicroBatch(tokens, tokens, mask, zero, zero, zero, tokens, zero, (3, 2), experts_TLK=given)


EXPERTS = [[3, 1], [2, 3], [-1, -1], [0, 3], [-1, -1]]


@pytest.mark.parametrize(
    ("arrangement", "expected"),
    [
        (EndToEnd, [[3, 1], [2, 3], [0, 1], [0, 3], [0, 1]]),
        (SideBySide, [[3, 1], [0, 3], [2, 3], [2, 3], [0, 1], [2, 3]]),
    ],
)
def test_tokens_that_nobody_read_are_dealt_out(arrangement: type[Arrangement], expected: list[list[int]]) -> None:
    batch = micro_batch(EXPERTS)
    grid = arrangement(Shares()).place(batch)  # type: ignore[call-arg]
    routing = ReplayedRouting(Shares(), 0, 2, Four(), recomputes=False)  # type: ignore[arg-type]
    assert routing.placed(batch, grid)[:, 1].tolist() == expected


@pytest.mark.parametrize("size", [1, 2])
def test_every_process_has_the_experts_of_its_own_places(size: int) -> None:
    """Over context- and sequence-parallel processes each token is told its experts once, at the place it stands."""
    batch, found = micro_batch(EXPERTS), []
    for context in range(2):
        shares = Shares(context=2, rank=context, tensor=size)
        grid = EndToEnd(shares).place(batch)
        whole = ReplayedRouting(replace(shares, tensor=1), 0, 2, Four(), False).placed(batch, grid)  # type: ignore[arg-type]
        parts = [
            ReplayedRouting(shares, rank, 2, Four(), False).placed(batch, grid)  # type: ignore[arg-type]
            for rank in range(size)
        ]
        assert torch.equal(torch.cat(parts), whole)
        here = (grid.place_T >= 0).nonzero()[:, 0].tolist()
        found += [(token, whole[grid.place_T[token], 1].tolist()) for token in here]
    assert len(found) == 5
    assert all(experts == EXPERTS[token] for token, experts in found if EXPERTS[token][0] >= 0)


@pytest.mark.parametrize(
    ("experts", "layers", "message"),
    [
        (None, 2, "needs the sampler's experts of every token; it gave none"),
        ([[3, 4], *EXPERTS[1:]], 2, "the highest number 4, in 2 layers, but the policy to 2 of 4 in 2: these are two"),
        (EXPERTS, 5, "in 2 layers, but the policy to 2 of 4 in 5: these are two models"),
    ],
)
def test_what_cannot_be_replayed_is_refused(experts: Sequence[Sequence[int]] | None, layers: int, message: str) -> None:
    batch = micro_batch(experts)
    routing = ReplayedRouting(Shares(), 0, layers, Four(), recomputes=False)  # type: ignore[arg-type]
    with pytest.raises(GppoError, match=message):
        routing.placed(batch, EndToEnd(Shares()).place(batch))


def test_a_micro_batch_without_loss_needs_no_experts() -> None:
    batch = filler()
    routing = ReplayedRouting(Shares(), 0, 3, Four(), recomputes=False)  # type: ignore[arg-type]
    assert routing.placed(batch, EndToEnd(Shares()).place(batch)).tolist() == [[[0, 1]] * 3]
