"""Sequence-level losses, CISPO, KL penalties and corrections against verl's own, in float64."""

import math
from dataclasses import replace

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

from gppo_megatron.objective.auxiliary import ReferenceKl
from gppo_megatron.objective.corrections import (
    Corrected,
    Corrector,
    MaskedSampling,
    SequenceRejection,
    TruncatedSampling,
)
from gppo_megatron.objective.policy_gradient import Objective, PolicyGradient, TokenStreams
from gppo_megatron.objective.presets import PRESETS, Cell
from gppo_megatron.objective.sequence import GeometricMean, SequenceRatio
from gppo_megatron.objective.trust_region import TrustRegion
from tests.external.batches import (
    Batch,
    Update,
    differentiate,
    our_update,
    random_batch,
    with_one_advantage_a_response,
)

UNBOUNDED = PolicyGradient(TrustRegion(Cell("tv", "mc", math.inf, math.inf)))


def verl_update(
    batch: Batch, loss: str, low: float, high: float, weights_BL: torch.Tensor | None = None, mean: str | None = None
) -> Update:
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1,
        clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=1e9,
    )  # fmt: skip

    def loss_of(log_pi_BL: torch.Tensor) -> torch.Tensor:
        value, _ = get_policy_loss_fn(loss)(
            batch.log_mu_BL, log_pi_BL, batch.advantages_BL, batch.mask_BL.double(),
            mean or "seq-mean-token-mean", config, rollout_is_weights=weights_BL,
        )  # fmt: skip
        return value

    return differentiate(loss_of, batch)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [1e-4, 0.05])
def test_gspo(seed: int, spread: float) -> None:
    batch = with_one_advantage_a_response(random_batch(seed, silent_responses=0), spread)
    theirs = verl_update(batch, "gspo", 3e-4, 4e-4)
    ours = our_update(batch, SequenceRatio(PolicyGradient(TrustRegion(PRESETS["gspo"].cell))), "sequence_mean")
    silenced_B = (theirs.gradient_BL == 0).all(1)
    assert silenced_B.sum() > 3 or spread < 1e-3
    assert (~silenced_B).sum() > 20
    # 1e-8 in verl's mean over a response's tokens, and float32 shares here.
    torch.testing.assert_close(ours.gradient_BL, theirs.gradient_BL, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_gmpo(seed: int) -> None:
    batch = with_one_advantage_a_response(random_batch(seed, silent_responses=0), 0.5)
    theirs = verl_update(batch, "geo_mean", 0.4, 0.4)
    ours = our_update(batch, GeometricMean(TrustRegion(PRESETS["gmpo"].cell)), "sequence_mean")
    silenced_BL = batch.mask_BL & (theirs.gradient_BL == 0)
    assert 50 < silenced_BL.sum() < batch.mask_BL.sum() / 2
    torch.testing.assert_close(ours.gradient_BL, theirs.gradient_BL, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_cispo(seed: int) -> None:
    batch = random_batch(seed, silent_responses=3)
    cap = PRESETS["cispo"].ratio_cap
    assert cap is not None
    theirs = verl_update(batch, "cispo", 1.0, cap - 1, mean="token-mean")
    ours = our_update(batch, replace(UNBOUNDED, ratio_cap=cap), "token_mean")
    torch.testing.assert_close(ours.gradient_BL, theirs.gradient_BL, rtol=2e-7, atol=0)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("corrector", "level", "threshold"),
    [
        (TruncatedSampling("token", 1.2), "token", "1.2"),
        (TruncatedSampling("sequence", 1.5), "sequence", "1.5"),
        (MaskedSampling("token", 0.8, 1.25), "token", "0.8_1.25"),
        (MaskedSampling("sequence", 0.5, 5.0), "sequence", "0.5_5.0"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("inner", ["cispo", "gspo"])
def test_weights_of_the_mismatch(corrector: Corrector, level: str, threshold: str, inner: str) -> None:
    batch = with_one_advantage_a_response(random_batch(2, silent_responses=0), 0.05)
    weights_BL, _ = compute_rollout_correction_weights(
        batch.log_mu_BL - batch.log_sampler_BL, batch.mask_BL.double(), level, threshold
    )
    surrogate: Objective = UNBOUNDED if inner == "cispo" else SequenceRatio(UNBOUNDED)
    theirs = verl_update(batch, inner, 1.0, 1e9, weights_BL)
    ours = our_update(batch, Corrected(surrogate, (corrector,)), "sequence_mean")
    raw_BL = weights_BL[batch.mask_BL]
    assert ((raw_BL == 0).sum() > 5) or ((raw_BL == float(threshold.split("_")[0])).sum() > 5)
    torch.testing.assert_close(ours.gradient_BL, theirs.gradient_BL, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("statistic", "mode"), [("mean", "seq_mean_k3"), ("largest", "seq_max_k3")])
def test_rejection_of_sequences(statistic: str, mode: str) -> None:
    batch = with_one_advantage_a_response(random_batch(3, silent_responses=0), 0.05)
    limit = 0.02 if statistic == "mean" else 0.1
    mask_BL, _ = compute_rollout_rejection_mask(
        batch.log_mu_BL - batch.log_sampler_BL, batch.mask_BL.double(), mode, str(limit)
    )
    kept_B = mask_BL.bool().any(1)
    assert 10 < kept_B.sum() < len(kept_B) - 10
    ours = our_update(batch, Corrected(UNBOUNDED, (SequenceRejection(statistic, limit),)), None)  # type: ignore[arg-type]
    plain = our_update(batch, UNBOUNDED, None)
    torch.testing.assert_close(ours.gradient_BL, plain.gradient_BL * mask_BL, rtol=1e-12, atol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalties(estimator: str) -> None:
    batch = random_batch(5, silent_responses=0)
    present_BL = batch.present_BL
    lengths = tuple(present_BL.sum(1).tolist())
    near_BL = torch.where(present_BL, batch.log_mu_BL + 0.1 * (batch.log_pi_BL - batch.log_mu_BL), 0.0)
    leaf_BL = near_BL.clone().requires_grad_()
    theirs_T = kl_penalty(leaf_BL, batch.log_mu_BL, estimator)[present_BL]
    (theirs_gradient_BL,) = torch.autograd.grad(theirs_T[batch.mask_BL[present_BL]].sum(), leaf_BL)
    log_pi_T = leaf_BL[present_BL]
    reference_T, mask_T = batch.log_mu_BL[present_BL], batch.mask_BL[present_BL]
    zeros_T, age_T = torch.zeros_like(reference_T), torch.zeros_like(mask_T, dtype=torch.int64)
    streams = TokenStreams(log_pi_T, zeros_T, zeros_T, zeros_T, zeros_T, age_T, mask_T, lengths, reference_T)
    ours_T = ReferenceKl(1.0, estimator)(streams).loss_T  # type: ignore[arg-type]
    (ours_gradient_BL,) = torch.autograd.grad(ours_T.sum(), leaf_BL)
    torch.testing.assert_close(ours_T[mask_T], theirs_T[mask_T])
    torch.testing.assert_close(ours_gradient_BL, theirs_gradient_BL, rtol=1e-12, atol=1e-12)
