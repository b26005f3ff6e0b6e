"""Groups and their advantages -> this rank's micro-batches for each optimizer step of a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gppo_megatron.errors import DataError
from gppo_megatron.objective.presets import Aggregation
from gppo_megatron.objective.reduce import token_shares
from gppo_megatron.types import Group, MicroBatch, Team, TrainBatch, Trajectory


@dataclass(frozen=True, eq=False)
class Weighted:
    """A trajectory and its advantage."""

    trajectory: Trajectory
    advantage: float


@dataclass(frozen=True)
class Packer:
    """Cuts a rollout into optimizer steps and micro-batches.

    updates: optimizer steps a rollout. micro_batch_tokens: most tokens of a micro-batch, padding included.
    aggregation, constant_length: how tokens weigh in the loss, see `objective.reduce`.
    data_team: the data-parallel ranks, between which token and sequence counts are added up.
    """

    updates: int
    micro_batch_tokens: int
    aggregation: Aggregation
    constant_length: int | None
    data_team: Team

    def pack(self, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]) -> list[TrainBatch]:
        """Collective over the data team: `updates` batches, in the groups' order.

        A trajectory without an advantage (its verifier failed) is left out of loss and counts.
        """
        pairs = [
            [(trajectory, advantage) for trajectory, advantage in zip(group.trajectories, values, strict=True)]
            for group, values in zip(groups, advantages, strict=True)
        ]
        # Cut before anything is left out, so that a failed verdict moves no other trajectory to another step.
        flat = [pair for group in pairs for pair in group]
        bounds = np.linspace(0, len(flat), self.updates + 1).round().astype(int)
        parts = [flat[start:end] for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
        return [self._batch([Weighted(t, a) for t, a in part if a is not None and t.trainable.any()]) for part in parts]

    def _batch(self, items: list[Weighted]) -> TrainBatch:
        packed = first_fit(items, self.micro_batch_tokens)
        tokens_here = sum(int(item.trajectory.trainable.sum()) for item in items)
        counts = self.data_team.gather((tokens_here, len(items), len(packed)))
        tokens, sequences = sum(count[0] for count in counts), sum(count[1] for count in counts)
        most = max(1, *(count[2] for count in counts))
        micro_batches = [self._micro_batch(part, tokens, sequences) for part in packed]
        micro_batches += [filler()] * (most - len(packed))
        return TrainBatch(tuple(micro_batches), tokens, sequences)

    def _micro_batch(self, items: list[Weighted], tokens: int, sequences: int) -> MicroBatch:
        lengths = tuple(len(item.trajectory.token_ids) for item in items)
        mask_T = _joined([item.trajectory.trainable for item in items])
        advantages_T = torch.tensor([item.advantage for item in items], dtype=torch.float32)
        advantages_T = advantages_T.repeat_interleave(torch.tensor(lengths))
        logprobs_T = torch.where(mask_T, _joined([item.trajectory.sampler_logprobs for item in items]), 0.0)
        return MicroBatch(
            tokens_T=torch.from_numpy(np.concatenate([item.trajectory.token_ids for item in items])),
            labels_T=_joined([item.trajectory.token_ids for item in items]),
            mask_T=mask_T,
            sampler_logprobs_T=logprobs_T,
            anchor_logprobs_T=logprobs_T,
            advantages_T=torch.where(mask_T, advantages_T, 0.0),
            policy_versions_T=torch.where(mask_T, _joined([item.trajectory.policy_versions for item in items]), -1),
            share_T=token_shares(mask_T, lengths, tokens, sequences, self.aggregation, self.constant_length),
            lengths=lengths,
        )


def _joined(sequences: Sequence[NDArray[Any]]) -> torch.Tensor:
    """Sequences end to end, each moved one place ahead: what belongs to token t + 1 stands at t, zero at the last.

    >>> _joined([np.array([7, 8, 9]), np.array([1, 2])])
    tensor([8, 9, 0, 2, 0])
    """
    return torch.from_numpy(np.concatenate([np.append(values[1:], np.zeros(1, values.dtype)) for values in sequences]))


def first_fit(items: Sequence[Weighted], micro_batch_tokens: int) -> list[list[Weighted]]:
    """Longest first, fill one padded micro-batch after another; every rows x longest is within the budget.

    Raises DataError for a sequence that alone exceeds it.
    """
    parts: list[list[Weighted]] = []
    longest = 0
    for item in sorted(items, key=lambda item: -len(item.trajectory.token_ids)):
        length = len(item.trajectory.token_ids)
        if length > micro_batch_tokens:
            raise DataError(
                f"a sequence of {length} tokens exceeds batch.micro_batch_tokens = {micro_batch_tokens}; "
                "raise it, or lower rollout.max_new_tokens"
            )
        if not parts or (len(parts[-1]) + 1) * longest > micro_batch_tokens:
            parts.append([])
            longest = length
        parts[-1].append(item)
    return parts


def filler() -> MicroBatch:
    """A micro-batch without loss, for a rank that has fewer than its peers."""
    zero, false = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    token = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(token, token, false, zero, zero, zero, token - 1, zero, (1,))
