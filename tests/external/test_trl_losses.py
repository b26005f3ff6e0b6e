"""PolicyGradient and its aggregations against the loss of TRL's GRPOTrainer, in float64."""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS, Aggregation, Cell
from gppo_megatron.objective.trust_region import TrustRegion
from tests.external.batches import (
    LONGEST,
    RESPONSES,
    Batch,
    Update,
    assert_reaches_every_branch,
    differentiate,
    our_update,
    random_batch,
    without_ties,
)

LENGTH = LONGEST + 9


@dataclass(frozen=True)
class Method:
    """A loss of TRL with its own numbers, and what must equal it here. delta: TRL's upper bound of the ratio."""

    loss: str
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    ours: PolicyGradient
    aggregation: Aggregation


def of_preset(name: str, loss: str, epsilon_low: float, epsilon_high: float, delta: float | None = None) -> Method:
    preset = PRESETS[name]
    ours = PolicyGradient(TrustRegion(preset.cell), dual_clip=delta)
    return Method(loss, epsilon_low, epsilon_high, delta, ours, preset.aggregation)


METHODS = {
    "ppo": of_preset("ppo", "bnpo", 0.2, 0.2),
    "grpo": of_preset("grpo", "grpo", 0.2, 0.2),
    "dr_grpo": of_preset("dr_grpo", "dr_grpo", 0.2, 0.2),
    "dapo": of_preset("dapo", "dapo", 0.2, 0.28),
    "dapo, dual clip": of_preset("dapo", "dapo", 0.2, 0.28, 3.0),
    "uneven clip": Method(
        "grpo", 0.5, 0.1, None, PolicyGradient(TrustRegion(Cell("tv", "mc", 0.25, 0.05))), "sequence_mean"
    ),
}


def trl_update(batch: Batch, method: Method) -> Update:
    """Calls the loss of a trainer that was never built: it holds what that method reads, and no model."""

    def loss_of(log_pi_BL: torch.Tensor) -> torch.Tensor:
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (log_pi_BL, torch.zeros_like(log_pi_BL), None),
            loss_type=method.loss,
            epsilon_low=method.epsilon_low,
            epsilon_high=method.epsilon_high,
            args=SimpleNamespace(delta=method.delta, steps_per_generation=1),
            importance_sampling_level="token",
            max_completion_length=LENGTH,
            beta=0.0,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1,
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(
                num_processes=1,
                sync_gradients=True,
                gather=lambda values: values,
                reduce=lambda values, reduction: values,
            ),
            _metrics={"train": defaultdict(list)},
        )
        tokens_BL = torch.zeros(RESPONSES, LONGEST, dtype=torch.int64)
        inputs = {
            "prompt_ids": tokens_BL[:, :1],
            "prompt_mask": torch.ones_like(tokens_BL[:, :1]),
            "completion_ids": tokens_BL,
            "completion_mask": batch.present_BL.long(),
            "tool_mask": batch.mask_BL.long(),
            "advantages": batch.advantages_BL,
            "old_per_token_logps": batch.log_mu_BL,
            "num_items_in_batch": batch.mask_BL.sum(),
        }
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    return differentiate(loss_of, batch)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", METHODS)
def test_gradient(name: str, seed: int) -> None:
    method = METHODS[name]
    batch = without_ties(random_batch(seed, silent_responses=0), method.ours.region.cell)
    theirs = trl_update(batch, method)
    assert_reaches_every_branch(theirs, batch, largest_ratio=method.delta or 20.0)
    ours = our_update(batch, method.ours, method.aggregation, LENGTH)
    # Our shares are float32.
    torch.testing.assert_close(ours.gradient_BL, theirs.gradient_BL, rtol=2e-7, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_ratio_cap_without_a_trust_region_is_cispo(seed: int) -> None:
    unbounded = TrustRegion(Cell("tv", "mc", 1e9, 1e9))
    method = Method("cispo", 0.0, 5.0, None, PolicyGradient(unbounded, ratio_cap=5.0), "token_mean")
    batch = random_batch(seed, silent_responses=3)
    ours, theirs = our_update(batch, method.ours, method.aggregation), trl_update(batch, method)
    assert ((batch.log_pi_BL - batch.log_mu_BL).exp()[batch.mask_BL] > 5.0).sum() > 20
    torch.testing.assert_close(ours.gradient_BL, theirs.gradient_BL, rtol=2e-7, atol=0)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_known_difference_of_responses_without_loss(name: str) -> None:
    """TRL counts them in its mean over responses, this project does not."""
    silent, method = 4, METHODS[name]
    batch = without_ties(random_batch(0, silent_responses=silent), method.ours.region.cell)
    ours, theirs = our_update(batch, method.ours, method.aggregation, LENGTH), trl_update(batch, method)
    counted_BL = theirs.gradient_BL * RESPONSES / (RESPONSES - silent)
    torch.testing.assert_close(ours.gradient_BL, counted_BL, rtol=2e-7, atol=0)
