"""Rejection of off-policy sequences against TRL's own, in float64."""

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from gppo_megatron.objective.corrections import Corrected, OffPolicyRejection
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import Cell
from gppo_megatron.objective.trust_region import TrustRegion
from tests.external.batches import our_update, random_batch, with_one_advantage_a_response

UNBOUNDED = PolicyGradient(TrustRegion(Cell("tv", "mc", 1e9, 1e9)))


@pytest.mark.parametrize("seed", range(4))
def test_off_policy_sequences(seed: int) -> None:
    batch = with_one_advantage_a_response(random_batch(seed, silent_responses=0), 0.05)
    limit = 0.01
    kept_B1 = GRPOTrainer.get_off_policy_mask(
        batch.advantages_BL[:, :1], batch.log_pi_BL, batch.log_sampler_BL, batch.mask_BL.double(), limit
    )
    assert 10 < kept_B1.sum() < len(kept_B1) - 10
    ours = our_update(batch, Corrected(UNBOUNDED, (OffPolicyRejection(limit),)), None)
    plain = our_update(batch, UNBOUNDED, None)
    torch.testing.assert_close(ours.gradient_BL, plain.gradient_BL * kept_B1, rtol=1e-12, atol=0)
