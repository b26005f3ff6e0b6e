"""Random batches of responses, and this project's loss and gradient on them. B: responses, L: longest response."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gppo_megatron.objective.policy_gradient import Objective, TokenStreams
from gppo_megatron.objective.presets import Aggregation, Cell
from gppo_megatron.objective.reduce import token_shares, total
from gppo_megatron.objective.trust_region import TrustRegion

RESPONSES, LONGEST = 128, 96
TIE = 1e-6


@dataclass(frozen=True, eq=False)
class Batch:
    """float64 [B, L], padded on the right with zeros; every method sees these numbers.

    log_sampler_BL: log-probs at sampling, close to log_mu_BL.
    present_BL: bool, positions that a response has. mask_BL: bool, those of them that carry loss.
    """

    log_pi_BL: torch.Tensor
    log_mu_BL: torch.Tensor
    advantages_BL: torch.Tensor
    present_BL: torch.Tensor
    mask_BL: torch.Tensor
    log_sampler_BL: torch.Tensor


@dataclass(frozen=True, eq=False)
class Update:
    """loss: 0-dimensional; gradient_BL: of the loss with respect to `log_pi_BL`."""

    loss: torch.Tensor
    gradient_BL: torch.Tensor


def random_batch(seed: int, silent_responses: int) -> Batch:
    """Ragged, with holes in the mask, ratios from e^-15 to e^7, confident, unmoved and zero-advantage tokens.

    silent_responses: how many, at the front, have tokens but no loss.
    """
    random = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(RESPONSES, LONGEST, generator=random, dtype=torch.float64)

    def chosen(share: float) -> torch.Tensor:
        return torch.rand(RESPONSES, LONGEST, generator=random) < share

    lengths_B = torch.randint(1, LONGEST + 1, (RESPONSES,), generator=random)
    present_BL = torch.arange(LONGEST) < lengths_B[:, None]
    mask_BL = present_BL & chosen(0.9)
    mask_BL[:, 0] = True
    mask_BL[:silent_responses] = False
    logit_BL = 3 * normal()
    move_BL = torch.where(chosen(0.2), 4.0, 1.0) * normal()
    moved_BL = torch.where(chosen(0.1), logit_BL, logit_BL + move_BL)
    streams = (
        torch.nn.functional.logsigmoid(moved_BL),
        torch.nn.functional.logsigmoid(logit_BL),
        torch.where(chosen(0.1), 0.0, normal()),
    )
    log_pi_BL, log_mu_BL, advantages_BL = (torch.where(present_BL, stream_BL, 0.0) for stream_BL in streams)
    log_sampler_BL = torch.where(present_BL, log_mu_BL + 0.2 * normal(), 0.0)
    return Batch(log_pi_BL, log_mu_BL, advantages_BL, present_BL, mask_BL, log_sampler_BL)


def with_one_advantage_a_response(batch: Batch, spread: float) -> Batch:
    """Every token has its response's first advantage, never 0; log pi is moved to `spread` of its distance from mu."""
    first_BL = torch.where(batch.advantages_BL[:, :1] >= 0, 0.5, -0.5) + batch.advantages_BL[:, :1]
    log_pi_BL = batch.log_mu_BL + spread * (batch.log_pi_BL - batch.log_mu_BL)
    return replace(batch, advantages_BL=torch.where(batch.present_BL, first_BL, 0.0), log_pi_BL=log_pi_BL)


def without_ties(batch: Batch, cell: Cell, slack_BL: torch.Tensor | float = TIE) -> Batch:
    """Take tokens whose divergence lies within `slack_BL` of a threshold out of the mask; they must be few."""
    decision = TrustRegion(cell).decide(batch.log_pi_BL, batch.log_mu_BL, batch.advantages_BL)
    tied_BL = torch.zeros_like(batch.mask_BL)
    for delta in (cell.delta_low, cell.delta_high):
        tied_BL |= (decision.divergence_T - delta).abs() < slack_BL
    assert (tied_BL & batch.mask_BL).sum() <= 3, "too many tokens near a threshold for the comparison to mean much"
    return replace(batch, mask_BL=batch.mask_BL & ~tied_BL)


def our_update(
    batch: Batch, objective: Objective, aggregation: Aggregation | None, constant_length: int | None = None
) -> Update:
    """As the trainer works it out: packed, two micro-batches, global counts. aggregation None: the plain sum."""
    tokens, sequences = int(batch.mask_BL.sum()), int(batch.mask_BL.any(1).sum())

    def loss_of(log_pi_BL: torch.Tensor) -> torch.Tensor:
        loss = log_pi_BL.new_zeros(())
        for rows_B in torch.arange(RESPONSES).split([RESPONSES // 3, RESPONSES - RESPONSES // 3]):
            present_BL = batch.present_BL[rows_B]
            log_pi_T, log_mu_T, advantages_T, mask_T = (
                stream_BL[rows_B][present_BL]
                for stream_BL in (log_pi_BL, batch.log_mu_BL, batch.advantages_BL, batch.mask_BL)
            )
            age_T = torch.zeros_like(mask_T, dtype=torch.int64)
            lengths = tuple(present_BL.sum(1).tolist())
            sampler_T = batch.log_sampler_BL[rows_B][present_BL]
            streams = TokenStreams(log_pi_T, -log_pi_T, log_mu_T, sampler_T, advantages_T, age_T, mask_T, lengths)
            loss_T = objective(streams).loss_T
            if aggregation is None:
                loss += loss_T.sum()
            else:
                shares_T = token_shares(mask_T, lengths, tokens, sequences, aggregation, constant_length)
                loss += total(loss_T, shares_T)
        return loss

    return differentiate(loss_of, batch)


def differentiate(loss_of: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Update:
    """`loss_of(log_pi_BL)` and its gradient."""
    leaf_BL = batch.log_pi_BL.clone().requires_grad_()
    loss = loss_of(leaf_BL)
    (gradient_BL,) = torch.autograd.grad(loss, leaf_BL)
    return Update(loss.detach(), gradient_BL)


def assert_reaches_every_branch(reference: Update, batch: Batch, largest_ratio: float) -> None:
    """The reference itself masks tokens on both sides, keeps some, and meets ratios above `largest_ratio`."""
    silenced_BL = batch.mask_BL & (reference.gradient_BL == 0)
    up_BL, down_BL = batch.log_pi_BL > batch.log_mu_BL, batch.log_pi_BL < batch.log_mu_BL
    positive_BL, negative_BL = batch.advantages_BL > 0, batch.advantages_BL < 0
    counts = {
        "masked above": silenced_BL & positive_BL & up_BL,
        "masked below": silenced_BL & negative_BL & down_BL,
        "kept outward": ~silenced_BL & batch.mask_BL & ((positive_BL & up_BL) | (negative_BL & down_BL)),
        "kept inward": ~silenced_BL & batch.mask_BL & ((positive_BL & down_BL) | (negative_BL & up_BL)),
        "unmoved": batch.mask_BL & (batch.log_pi_BL == batch.log_mu_BL),
        "without advantage": batch.mask_BL & (batch.advantages_BL == 0),
        "large ratio": batch.mask_BL & negative_BL & (batch.log_pi_BL - batch.log_mu_BL).exp().gt(largest_ratio),
    }
    assert all(int(selected_BL.sum()) >= 5 for selected_BL in counts.values()), {
        name: int(selected_BL.sum()) for name, selected_BL in counts.items()
    }
