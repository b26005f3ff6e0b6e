"""The frozen reference policy: its log-probs, what it holds, and that training leaves it alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gppo_megatron.config.schema import Optimizer
from gppo_megatron.objective.auxiliary import ReferenceKl, WithTerms
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.update import MegatronPolicy, ReferenceScorer
from tests.distributed.layouts import TEMPERATURE
from tests.distributed.reference import VOCAB, batch_of, from_folder, predictions, random_model, trajectories_of
from tests.single_process import model_of, world_of_one

GPPO = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_model("qwen3", True).save_pretrained(path)
    return path


def test_the_references_log_probs_are_its_own_before_and_after_training(folder: Path) -> None:
    policy = MegatronPolicy(model_of(folder, TEMPERATURE), Optimizer(lr=1e-2), 3)
    scorer = ReferenceScorer(model_of(folder, TEMPERATURE, frozen=True))
    assert not any(parameter.requires_grad for chunk in scorer.model.chunks for parameter in chunk.parameters())
    assert sum(buffer.grad_data.numel() for chunk in scorer.model.chunks for buffer in chunk.buffers) == 0
    hf = from_folder(folder)
    expected = {
        tuple(trajectory.token_ids): predictions(hf, trajectory).log_pi.detach()
        for trajectory in trajectories_of(VOCAB)
    }
    penalised = WithTerms(GPPO, (ReferenceKl(0.1, "k2"),))
    seen = []
    for _ in range(2):
        batch = scorer(batch_of(micro_batch_tokens=60))
        for micro in batch.micro_batches:
            assert micro.reference_logprobs_T is not None
            streams = (micro.tokens_T, micro.mask_T, micro.reference_logprobs_T)
            for tokens, mask, logprobs in zip(*(stream.split(micro.lengths) for stream in streams), strict=True):
                assert (logprobs[mask] - expected[tuple(tokens.tolist())]).abs().max() <= 1e-5
                assert logprobs[~mask].abs().max() == 0
        seen.append(policy.update(batch, penalised).flat())
    assert seen[0]["kl/k3"] == pytest.approx(0.0, abs=1e-9), "the policy starts as its reference"
    assert seen[1]["kl/k3"] > 1e-4, "and then moves away from it"
    assert seen[0]["kl/non_finite"] == 0


def test_a_strong_penalty_holds_the_policy_at_its_reference(folder: Path) -> None:
    def drift(coefficient: float) -> float:
        policy = MegatronPolicy(model_of(folder, TEMPERATURE), Optimizer(lr=1e-3), 20)
        scorer = ReferenceScorer(model_of(folder, TEMPERATURE, frozen=True))
        batch = scorer(batch_of(micro_batch_tokens=60))
        objective = WithTerms(GPPO, (ReferenceKl(coefficient, "k2"),))
        return [policy.update(batch, objective).flat()["kl/k3"] for _ in range(8)][-1]

    torch.manual_seed(0)
    assert drift(100.0) < drift(1e-6) / 2
