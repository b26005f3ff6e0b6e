"""Tokens -> one number. The only place that sums losses, and it divides by global counts alone.

Because a token's share does not depend on the micro-batch it lies in, any split of a batch has the same total.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gppo_megatron.objective.presets import Aggregation


@dataclass(frozen=True)
class GlobalCounts:
    """What all ranks' micro-batches of one optimizer step hold together.

    tokens: predictions with loss; sequences: sequences that have one. constant_length: tokens, None where unused.
    """

    tokens: int
    sequences: int
    constant_length: int | None = None

    @property
    def length(self) -> int:
        """constant_length; raises ValueError where it is needed and missing."""
        if self.constant_length is None or self.constant_length < 1:
            raise ValueError(f"constant_length must be at least 1, got {self.constant_length}")
        return self.constant_length


# (tokens with loss of the token's own sequence, float64 [T]; global counts) -> the token's denominator, float64 [T]
AGGREGATIONS: dict[Aggregation, Callable[[torch.Tensor, GlobalCounts], torch.Tensor]] = {
    "token_mean": lambda own_T, counts: torch.full_like(own_T, counts.tokens),
    "sequence_mean": lambda own_T, counts: own_T * counts.sequences,
    "constant_length": lambda own_T, counts: torch.full_like(own_T, counts.sequences * counts.length),
}


def token_shares(
    mask_T: torch.Tensor,
    lengths: Sequence[int],
    tokens: int,
    sequences: int,
    aggregation: Aggregation,
    constant_length: int | None = None,
) -> torch.Tensor:
    """float32 [T]: each token's weight in the global mean; 0 outside the mask.

    token_mean: 1 / tokens. sequence_mean: 1 / (sequences x the sequence's tokens with loss).
    constant_length: 1 / (sequences x constant_length). `tokens` and `sequences` are the global counts over all ranks
    and micro-batches; a sequence without loss tokens is not counted. Raises ValueError where they are less than here.

    Example, sequence_mean with sequences = 2: lengths (3, 2), mask 1 1 0 | 0 1 -> 1/4 1/4 0 | 0 1/2.
    """
    if sum(lengths) != len(mask_T):
        raise ValueError(f"the sequences hold {sum(lengths)} tokens, but the mask {len(mask_T)}")
    sequence_T = torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device=mask_T.device))
    per_sequence = torch.zeros(len(lengths), dtype=torch.float64, device=mask_T.device)
    per_sequence.index_add_(0, sequence_T, mask_T.double())
    here = int(per_sequence.sum()), int(per_sequence.count_nonzero())
    if here[0] > tokens or here[1] > sequences:
        raise ValueError(f"{here[0]} loss tokens in {here[1]} sequences, but globally only {tokens} in {sequences}")
    denominator_T = AGGREGATIONS[aggregation](
        per_sequence[sequence_T], GlobalCounts(tokens, sequences, constant_length)
    )
    return torch.where(mask_T, 1 / denominator_T, 0.0).float()


def total(loss_T: torch.Tensor, share_T: torch.Tensor) -> torch.Tensor:
    """sum_t share_t loss_t, in float32 (float64 for a float64 loss). Where the share is 0 the loss may be NaN."""
    loss_T = loss_T.to(torch.promote_types(loss_T.dtype, torch.float32))
    return (torch.where(share_T > 0, loss_T, 0.0) * share_T).sum()
