"""PolicyGradient and its aggregations against verl's registered policy losses, in float64."""

from dataclasses import dataclass

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS, Aggregation, Cell
from gppo_megatron.objective.trust_region import TrustRegion
from tests.external.batches import (
    TIE,
    Batch,
    Update,
    assert_reaches_every_branch,
    differentiate,
    our_update,
    random_batch,
    without_ties,
)

NEVER = 1e9
"""verl's vanilla loss always clips twice; at this bound the second clip never acts."""

AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant_length",
}
LENGTH = 37


@dataclass(frozen=True)
class Method:
    """One policy loss of verl with its own numbers, and what must equal it here."""

    loss: str
    clip_low: float
    clip_high: float
    clip_c: float
    ours: PolicyGradient


def region(cell: Cell | str) -> TrustRegion:
    return TrustRegion(PRESETS[cell].cell if isinstance(cell, str) else cell)


METHODS = {
    "ppo": Method("vanilla", 0.2, 0.2, NEVER, PolicyGradient(region("ppo"))),
    "grpo": Method("vanilla", 0.2, 0.2, NEVER, PolicyGradient(region("grpo"))),
    "dr_grpo": Method("vanilla", 0.2, 0.2, NEVER, PolicyGradient(region("dr_grpo"))),
    "dapo": Method("vanilla", 0.2, 0.28, NEVER, PolicyGradient(region("dapo"))),
    "dapo, dual clip": Method("vanilla", 0.2, 0.28, 3.0, PolicyGradient(region("dapo"), dual_clip=3.0)),
    "wide clip, dual clip": Method(
        "vanilla", 0.2, 4.0, 3.0, PolicyGradient(region(Cell("tv", "mc", 0.1, 2.0)), dual_clip=3.0)
    ),
    "uneven clip": Method("vanilla", 0.5, 0.1, NEVER, PolicyGradient(region(Cell("tv", "mc", 0.25, 0.05)))),
    "dppo_tv": Method("dppo_tv", 0.15, 0.15, 20.0, PolicyGradient(region("dppo_tv"), ratio_cap=20.0)),
    "uneven dppo_tv": Method(
        "dppo_tv", 0.3, 0.1, 5.0, PolicyGradient(region(Cell("tv", "binary", 0.3, 0.1)), ratio_cap=5.0)
    ),
    "dppo_kl": Method("dppo_kl", 0.05, 0.05, 20.0, PolicyGradient(region("dppo_kl"), ratio_cap=20.0)),
    "uneven dppo_kl": Method(
        "dppo_kl", 0.15, 0.02, 5.0, PolicyGradient(region(Cell("kl_fwd", "binary", 0.15, 0.02)), ratio_cap=5.0)
    ),
}


def verl_update(batch: Batch, method: Method, aggregation: str) -> Update:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        ppo_mini_batch_size=1,
        clip_ratio_low=method.clip_low,
        clip_ratio_high=method.clip_high,
        clip_ratio_c=method.clip_c,
        global_batch_info={"loss_scale_factor": LENGTH},
    )
    policy_loss = get_policy_loss_fn(method.loss)

    def loss_of(log_pi_BL: torch.Tensor) -> torch.Tensor:
        mask_BL = batch.mask_BL.double()
        loss, _ = policy_loss(batch.log_mu_BL, log_pi_BL, batch.advantages_BL, mask_BL, aggregation, config)
        return loss

    return differentiate(loss_of, batch)


def settled_batch(seed: int, method: Method) -> Batch:
    """With silent responses, and without the tokens on which rounding, or verl's own, could decide."""
    batch = random_batch(seed, silent_responses=3)
    slack_BL: torch.Tensor | float = TIE
    if method.loss == "dppo_kl":
        # verl adds 1e-8 to both 1 - p: this moves its divergence by at most 1e-8 (1 - mu) / (1 - pi).
        rest_mu_BL, rest_pi_BL = (-torch.expm1(log_p_BL) for log_p_BL in (batch.log_mu_BL, batch.log_pi_BL))
        slack_BL = TIE + 1e-8 * torch.where(batch.present_BL, rest_mu_BL / rest_pi_BL, 1.0)
    return without_ties(batch, method.ours.region.cell, slack_BL)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", METHODS)
def test_gradient_of_every_token(name: str, seed: int) -> None:
    method = METHODS[name]
    batch = settled_batch(seed, method)
    theirs = verl_update(batch, method, "token-sum")
    assert_reaches_every_branch(theirs, batch, largest_ratio=min(method.clip_c, 20.0))
    ours = our_update(batch, method.ours, None)
    torch.testing.assert_close(ours.gradient_BL, theirs.gradient_BL, rtol=1e-12, atol=0)
    if method.loss != "vanilla":  # the clip form has the same gradient but another value
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", METHODS)
def test_gradient_of_the_mean(name: str, aggregation: str, seed: int) -> None:
    method = METHODS[name]
    batch = settled_batch(seed, method)
    theirs = verl_update(batch, method, aggregation)
    ours = our_update(batch, method.ours, AGGREGATIONS[aggregation], LENGTH)
    # Our shares are float32.
    torch.testing.assert_close(ours.gradient_BL, theirs.gradient_BL, rtol=2e-7, atol=0)
    if method.loss != "vanilla":
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)
