"""The Megatron policy against transformers, plain autograd and torch's own AdamW, in one process and in float32."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gppo_verifiers.types import Answer, Status, Task, Verdict
from megatron.core.transformer.mlp import MLP

from gppo_megatron.config.schema import Memory, Optimizer
from gppo_megatron.data.packing import Packer, filler
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.objective.policy_gradient import (
    MaximumLikelihood,
    PolicyGradient,
)
from gppo_megatron.objective.presets import PRESETS, Aggregation
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron import forward, head
from gppo_megatron.policy.megatron.attention import SequenceAttention
from gppo_megatron.policy.megatron.save import SaveHf
from gppo_megatron.policy.megatron.update import MegatronModel, MegatronPolicy
from gppo_megatron.rollout.collect import Collector
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.rollout.engine import Sampling
from gppo_megatron.types import Alone, Prompt, TrainBatch
from gppo_megatron.weight_sync.in_process import InProcess
from tests.distributed.layouts import TEMPERATURE, Recording, advantage_of
from tests.distributed.reference import (
    FAMILIES,
    VOCAB,
    assert_close,
    batch_of,
    from_folder,
    hf_gradients,
    make_sensitive,
    named,
    predictions,
    random_model,
    relative,
    trajectories_of,
)
from tests.single_process import CPU, logits_of, model_of, world_of_one

LENGTH = 8
GPPO = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
OPTIMIZER = Optimizer(lr=1e-2, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, clip_grad=0.0)
MODELS = [(family, tied) for family in sorted(FAMILIES) for tied in (False, True)]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """A model of each family, tied and not."""
    paths = {}
    for family, tied in MODELS:
        path = tmp_path_factory.mktemp(family)
        random_model(family, tied).save_pretrained(path)
        paths[family, tied] = path
    return paths


@pytest.fixture
def folder(folders: dict[tuple[str, bool], Path]) -> Path:
    return folders["qwen3", True]


def policy_of(model: MegatronModel, optimizer: Optimizer = OPTIMIZER, steps: int = 10) -> MegatronPolicy:
    return MegatronPolicy(model, optimizer, steps)


def exported_gradients(model: MegatronModel) -> dict[str, torch.Tensor]:
    return dict(model.export(lambda parameter: parameter.main_grad, torch.float32))


def exported_weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


# Logits


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_logits_equal_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    hf = random_model(family, tied).eval()
    make_sensitive(hf, family.startswith("qwen3"))
    hf.save_pretrained(tmp_path)
    tokens_BS = torch.randint(VOCAB, (3, 19), generator=torch.Generator().manual_seed(1))
    logits_BSV = logits_of(model_of(tmp_path), tokens_BS)
    with torch.no_grad():
        expected = hf(tokens_BS).logits
        assert relative(logits_BSV, expected) <= 1e-5
        norms = [module for name, module in hf.named_modules() if name.split(".")[-1].endswith("norm")]
        assert len(norms) == (9 if family.startswith("qwen3") else 5)
        for norm in norms:
            for epsilon in (1e-6, 1e-5):
                norm.variance_epsilon = epsilon
                assert relative(hf(tokens_BS).logits, expected) > 1e-3, "a wrong epsilon would go unseen"
            norm.variance_epsilon = 4e-6
        hf.model.rotary_emb.inv_freq.copy_(10_000.0 ** -(torch.arange(0, 8, 2) / 8))
        assert relative(hf(tokens_BS).logits, expected) > 1e-3, "a wrong rope_theta would go unseen"


# Gradients


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_the_gradient_of_every_family(folders: dict[tuple[str, bool], Path], family: str, tied: bool) -> None:
    model = model_of(folders[family, tied], TEMPERATURE)
    policy_of(model).update(batch_of(), GPPO)
    assert_close(exported_gradients(model), hf_gradients(folders[family, tied]), 1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [4096, 20])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_the_gradient_of_every_aggregation(folder: Path, aggregation: Aggregation, micro_batch_tokens: int) -> None:
    batch = batch_of(micro_batch_tokens, aggregation, LENGTH)
    assert (len(batch.micro_batches) == 1) == (micro_batch_tokens == 4096)
    model = model_of(folder, TEMPERATURE)
    objective = Recording(GPPO, [], [])
    metrics = policy_of(model).update(batch, objective).flat()
    assert min(objective.distances) > 1e-5, "a token lies on its threshold: either decision is right"
    gradients = hf_gradients(folder, aggregation, LENGTH)
    assert_close(exported_gradients(model), gradients, 1e-5)
    norm = math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients.values()))
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert 0.3 < metrics["kept/positive"] < 0.95
    assert 0.3 < metrics["kept/negative"] < 0.95


@pytest.mark.parametrize(
    ("memory", "runs"),
    [
        (Memory(), {"attention": 2, "mlp": 2}),
        (Memory(recompute="full"), {"attention": 4, "mlp": 4}),
        (Memory(recompute="full", recompute_layers=2), {"attention": 4, "mlp": 4}),
        (Memory(recompute="selective"), {"attention": 2, "mlp": 4}),
        (Memory(recompute="selective", recompute_modules=("core_attn",)), {"attention": 4, "mlp": 2}),
    ],
)
def test_recomputing_runs_layers_again_and_changes_no_gradient(
    folder: Path, monkeypatch: pytest.MonkeyPatch, memory: Memory, runs: dict[str, int]
) -> None:
    calls = {"attention": 0, "mlp": 0}

    def counted(owner: type, what: str) -> None:
        original = owner.forward

        def forward(self: object, *arguments: Any, **options: Any) -> Any:
            calls[what] += 1
            return original(self, *arguments, **options)

        monkeypatch.setattr(owner, "forward", forward)

    counted(SequenceAttention, "attention")
    counted(MLP, "mlp")
    model = model_of(folder, TEMPERATURE, memory=memory)
    policy_of(model).update(batch_of(), GPPO)
    assert calls == runs, "of 2 layers"
    assert_close(exported_gradients(model), hf_gradients(folder), 1e-5)


def test_the_gradient_with_a_head_of_one_column_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "SCRATCH_BYTES", 1)
    model = model_of(folder, TEMPERATURE)
    policy_of(model).update(batch_of(), GPPO)
    assert_close(exported_gradients(model), hf_gradients(folder), 1e-5)


def test_only_rows_with_loss_reach_the_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def counted(hidden_NH: torch.Tensor, *arguments: Any) -> head.TokenStatistics:
        rows.append(len(hidden_NH))
        return head.token_statistics(hidden_NH, *arguments)

    monkeypatch.setattr(forward, "token_statistics", counted)
    batch = batch_of(micro_batch_tokens=60)
    policy_of(model_of(folder)).update(batch, GPPO)
    assert rows == [int(micro.mask_T.sum()) for micro in batch.micro_batches]
    assert len(rows) > 1


@pytest.mark.parametrize("first", [False, True])
def test_an_empty_micro_batch_leaves_every_bit_of_the_gradient(folder: Path, first: bool) -> None:
    batch = batch_of(micro_batch_tokens=60)
    parts = (filler(), *batch.micro_batches) if first else (*batch.micro_batches, filler())
    gradients = []
    for each in (batch, replace(batch, micro_batches=parts)):
        model = model_of(folder, TEMPERATURE)
        policy_of(model).update(each, GPPO)
        gradients.append(exported_gradients(model))
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_a_batch_without_loss_has_no_gradient(folder: Path) -> None:
    model = model_of(folder)
    policy = policy_of(model, replace(OPTIMIZER, weight_decay=0.0))
    before = exported_weights(policy)
    metrics = policy.update(TrainBatch((filler(),), 0, 0), GPPO).flat()
    assert metrics["optimizer/grad_norm"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())


# Log-probs


def test_recomputed_log_probs_are_the_models_own_and_make_every_ratio_one(folder: Path) -> None:
    model = model_of(folder, TEMPERATURE)
    policy = policy_of(model)
    batch = policy.annotate(batch_of(micro_batch_tokens=60))
    hf = from_folder(folder)
    expected = {
        tuple(trajectory.token_ids): predictions(hf, trajectory).log_pi.detach()
        for trajectory in trajectories_of(VOCAB)
    }
    for micro in batch.micro_batches:
        parts = [torch.split(stream, list(micro.lengths)) for stream in (micro.tokens_T, micro.mask_T)]
        anchors = torch.split(micro.anchor_logprobs_T, list(micro.lengths))
        for tokens, mask, anchor in zip(*parts, anchors, strict=True):
            assert (anchor[mask] - expected[tuple(tokens.tolist())]).abs().max() <= 1e-5
            assert anchor[~mask].abs().max() == 0
    metrics = policy.update(batch, GPPO).flat()
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert metrics["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert metrics["divergence/mean"] == pytest.approx(0, abs=1e-9)
    assert (metrics["kept/positive"], metrics["kept/negative"]) == (1, 1)
    assert policy.update(batch, GPPO).flat()["ratio/max"] > 1.01, "the anchor must not follow the policy"


@dataclass(frozen=True)
class Alternating:
    """A judge that says right and wrong in turn."""

    def judge(self, answers: list[Answer]) -> list[Verdict]:
        return [Verdict(float(place % 2), Status.GRADED) for place in range(len(answers))]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_sampler_agrees_with_the_policy_before_and_after_every_publication(
    folders: dict[tuple[str, bool], Path], family: str
) -> None:
    folder = folders[family, True]
    temperature = 0.7
    policy = policy_of(model_of(folder, temperature))
    engine = EmbeddedEngine(folder, torch.float32, CPU, cache_tokens=200)
    sync = InProcess(engine)
    random = np.random.default_rng(2)
    prompts = [
        Prompt(str(place), tuple(map(int, random.integers(2, VOCAB, random.integers(1, 12)))), Task("none"))
        for place in range(8)
    ]
    collector = Collector(engine, Alternating(), Sampling(temperature, 9, frozenset({1, 2, 3})), str, 4, seed=1)
    packer = Packer(1, 100, "token_mean", None, Alone())
    moved = []
    for step in range(4):
        sync.publish(policy.version, policy.weights)
        groups = collector.collect(prompts, range(len(prompts)), step, StepMetrics())
        advantages = [[advantage_of(trajectory) for trajectory in group.trajectories] for group in groups]
        (batch,) = packer.pack(groups, advantages)
        annotated = policy.annotate(batch)
        for micro in annotated.micro_batches:
            gap = (micro.anchor_logprobs_T - micro.sampler_logprobs_T)[micro.mask_T].abs()
            assert gap.max() <= 1e-5
        metrics = policy.update(batch, GPPO).flat()
        assert metrics["policy/sampler_gap_max"] <= 1e-5
        assert metrics["policy/age"] == 0
        again = policy.annotate(batch)
        moved += [
            float((after.anchor_logprobs_T - before.anchor_logprobs_T).abs().max())
            for before, after in zip(annotated.micro_batches, again.micro_batches, strict=True)
        ]
    assert policy.version == 4
    assert min(moved) > 1e-2, "an update must move the log-probs, or agreement after it shows nothing"


# The optimizer


def rate(config: Optimizer, step: int, decay_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 1."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    part = min(1.0, (step - config.warmup_steps) / (decay_steps - config.warmup_steps))
    share = {"constant": 1.0, "linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2}[config.schedule]
    return config.min_lr + (config.lr - config.min_lr) * share if config.schedule != "constant" else config.lr


SCHEDULES = [
    Optimizer(lr=1e-3),
    Optimizer(lr=1e-3, warmup_steps=3),
    Optimizer(lr=1e-3, warmup_steps=2, schedule="cosine", decay_steps=5, min_lr=1e-4),
    Optimizer(lr=1e-3, schedule="cosine"),
    Optimizer(lr=1e-3, warmup_steps=1, schedule="linear"),
]


@pytest.mark.parametrize("config", SCHEDULES)
def test_learning_rates_follow_their_closed_form(folder: Path, config: Optimizer) -> None:
    policy = policy_of(model_of(folder), config, steps=6)
    batch = TrainBatch((filler(),), 0, 0)
    rates = [policy.update(batch, GPPO).flat()["optimizer/lr"] for _ in range(6)]
    decay_steps = config.decay_steps or 7
    assert rates == pytest.approx([rate(config, step, decay_steps) for step in range(1, 7)], rel=1e-12)
    assert min(rates) > 0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_stage_of_one_step_takes_it(folder: Path, schedule: Any) -> None:
    policy = policy_of(model_of(folder), Optimizer(lr=1e-3, schedule=schedule), steps=1)
    assert policy.update(batch_of(), GPPO).flat()["optimizer/lr"] >= 0.5e-3


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
@pytest.mark.parametrize("clip_grad", [0.0, 0.05])
def test_weights_equal_those_of_adamw(folders: dict[tuple[str, bool], Path], family: str, clip_grad: float) -> None:
    """Five steps of maximum likelihood with warm-up and decay; norms and biases are spared the weight decay."""
    folder = folders[family, False]
    config = replace(OPTIMIZER, clip_grad=clip_grad, warmup_steps=2, schedule="cosine", decay_steps=8, min_lr=1e-3)
    policy = policy_of(model_of(folder, TEMPERATURE), config)
    hf = from_folder(folder)
    decayed = [parameter for parameter in hf.parameters() if parameter.ndim == 2]
    spared = [parameter for parameter in hf.parameters() if parameter.ndim == 1]
    assert len(spared) >= 5
    adamw = torch.optim.AdamW(
        [{"params": decayed}, {"params": spared, "weight_decay": 0.0}],
        lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay,
    )  # fmt: skip
    batch = batch_of(micro_batch_tokens=80)
    start = exported_weights(policy)
    for step in range(1, 6):
        for group in adamw.param_groups:
            group["lr"] = rate(config, step, 8)
        adamw.zero_grad()
        (-torch.cat([predictions(hf, trajectory).log_pi for trajectory in trajectories_of(VOCAB)]).mean()).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(hf.parameters(), clip_grad or math.inf))
        adamw.step()
        metrics = policy.update(batch, MaximumLikelihood()).flat()
        assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert norm > 1, "clipping must matter"
        ours = {name: tensor - start[name] for name, tensor in policy.weights()}
        theirs = {name: parameter.detach() - start[name] for name, parameter in hf.named_parameters()}
        assert_close(ours, theirs, 2e-4)
    assert policy.version == 5


def test_the_gradient_is_clipped_to_its_norm(folder: Path) -> None:
    gradients = {}
    for clip_grad in (0.0, 0.01):
        model = model_of(folder, TEMPERATURE)
        metrics = policy_of(model, replace(OPTIMIZER, clip_grad=clip_grad)).update(batch_of(), GPPO).flat()
        gradients[clip_grad] = exported_gradients(model)
        norm = metrics["optimizer/grad_norm"]
        assert norm > 0.02
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients[0.0].values()]
    for parameter, gradient in zip(parameters, gradients[0.0].values(), strict=True):
        parameter.grad = gradient
    assert float(torch.nn.utils.clip_grad_norm_(parameters, 0.01)) == pytest.approx(norm, rel=1e-5)
    expected = dict(zip(gradients[0.0], [parameter.grad for parameter in parameters], strict=True))
    assert_close(gradients[0.01], expected, 1e-5)


# Export and precision


@pytest.mark.parametrize(("family", "tied"), MODELS)
def test_an_exported_model_is_the_policy(
    folders: dict[tuple[str, bool], Path], family: str, tied: bool, tmp_path: Path
) -> None:
    folder = folders[family, tied]
    model = model_of(folder, TEMPERATURE)
    policy = policy_of(model)
    for _ in range(2):
        policy.update(batch_of(), GPPO)
    SaveHf(policy, tmp_path, folder, Alone())(7, StepMetrics())
    exported, start = from_folder(tmp_path / "hf-step-7"), from_folder(folder)
    weights = dict(policy.weights())
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: parameter.shape for name, parameter in named(dict(start.named_parameters())).items()
    }
    assert ("lm_head.weight" in weights) != tied
    for name, parameter in named(dict(exported.named_parameters())).items():
        assert torch.equal(parameter, weights[name]), name
    tokens_BS = torch.randint(VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative(logits_of(model, tokens_BS), exported(tokens_BS).logits) <= 1e-5
        assert relative(logits_of(model, tokens_BS), start(tokens_BS).logits) > 1e-2


def test_a_bfloat16_model_has_float32_log_probs_and_stays_finite(folder: Path) -> None:
    model = model_of(folder, TEMPERATURE, torch.bfloat16)
    policy = policy_of(model)
    batch = batch_of()
    (micro,) = batch.micro_batches
    rows = torch.nn.utils.rnn.pad_sequence(list(torch.split(micro.tokens_T, list(micro.lengths))), batch_first=True)
    logits_BSV = logits_of(model, rows)
    assert logits_BSV.dtype == torch.bfloat16
    log_probs_BSV = torch.log_softmax(logits_BSV.double() / TEMPERATURE, -1)
    flat_TV = torch.cat([log_probs[:length] for log_probs, length in zip(log_probs_BSV, micro.lengths, strict=True)])
    expected_T = flat_TV.gather(1, micro.labels_T[:, None]).squeeze(1)[micro.mask_T]
    objective = Recording(GPPO, [], [])
    metrics = policy.update(batch, objective).flat()
    (logprobs_T,) = objective.logprobs
    assert logprobs_T.dtype == torch.float32
    # The model's own head rounds each logit to 8 bits.
    rounding = float(logits_BSV.abs().max()) / TEMPERATURE / 2**9
    assert (logprobs_T - expected_T).abs().max() <= 2 * rounding
    assert all(math.isfinite(value) for value in metrics.values())
    reference = hf_gradients(folder)
    gradients = exported_gradients(model)
    assert max(relative(gradients[name], gradient) for name, gradient in reference.items()) < 0.2
    start = from_folder(folder)
    for name, tensor in policy.weights():
        assert tensor.dtype == torch.bfloat16
        assert tensor.isfinite().all()
        assert not torch.equal(tensor.float(), start.get_parameter(name).bfloat16().float()), name
