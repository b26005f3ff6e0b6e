"""Groups and their advantages -> this rank's micro-batches for each optimizer step of a rollout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gppo_megatron.data.balance import PackedRoom, Room, Work, first_fit, rebalanced, spread
from gppo_megatron.errors import DataError
from gppo_megatron.objective.presets import Aggregation
from gppo_megatron.objective.reduce import token_shares
from gppo_megatron.types import Group, MicroBatch, Team, TopStreams, TopTokens, TrainBatch, Trajectory


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
    data_team: the data-parallel ranks, among which work is evened out and counts are added up.
    multiple: the micro-batches of a batch are a multiple of it, as an interleaved pipeline needs.
    room: what a micro-batch's tensors hold. work: what a sequence costs.
    """

    updates: int
    micro_batch_tokens: int
    aggregation: Aggregation
    constant_length: int | None
    data_team: Team
    multiple: int = 1
    room: Room = PackedRoom()  # noqa: RUF009 - frozen
    work: Work = Work(linear=4096)  # noqa: RUF009 - frozen

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
        items = self._evened_out(items)
        lengths = [len(item.trajectory.token_ids) for item in items]
        self._check(lengths)
        tokens_here = sum(int(item.trajectory.trainable.sum()) for item in items)
        fewest = len(first_fit(lengths, self.room, self.micro_batch_tokens))
        counts = self.data_team.gather((tokens_here, len(items), fewest))
        tokens, sequences = sum(count[0] for count in counts), sum(count[1] for count in counts)
        most = math.ceil(max(1, *(count[2] for count in counts)) / self.multiple) * self.multiple
        parts = spread(lengths, self.room, self.micro_batch_tokens, self.work, most)
        packed = [[items[index] for index in part] for part in parts]
        return TrainBatch(
            tuple(self._micro_batch(part, tokens, sequences) if part else filler() for part in packed),
            tokens,
            sequences,
        )

    def _evened_out(self, items: list[Weighted]) -> list[Weighted]:
        """Collective: this rank's sequences after some have been exchanged, so that all ranks have as much work."""
        team = self.data_team
        works = team.gather([self.work.of(len(item.trajectory.token_ids)) for item in items])
        parts = rebalanced(works)
        leaving = {place.item for rank, part in enumerate(parts) for place in part if place.rank == team.rank != rank}
        sent = team.gather({item: items[item] for item in leaving})
        return [
            items[place.item] if place.rank == team.rank else sent[place.rank][place.item] for place in parts[team.rank]
        ]

    def _check(self, lengths: Sequence[int]) -> None:
        """Raises DataError for a sequence that alone exceeds the budget."""
        for length in lengths:
            if self.room.tokens([length]) > self.micro_batch_tokens:
                raise DataError(
                    f"a sequence of {length} tokens exceeds batch.micro_batch_tokens = {self.micro_batch_tokens}; "
                    "raise it, or lower rollout.max_new_tokens"
                )

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
            top=_top_streams([item.trajectory.top for item in items]),
            experts_TLK=_experts([item.trajectory.experts for item in items]),
        )


def _top_streams(tops: Sequence[TopTokens | None]) -> TopStreams | None:
    """None unless every sequence has them."""
    given = [top for top in tops if top is not None]
    if len(given) < len(tops):
        return None
    return TopStreams(
        _joined([top.ids for top in given]),
        _joined([top.logprobs for top in given]),
        _joined([top.rest for top in given]),
    )


def _experts(chosen: Sequence[NDArray[np.int16] | None]) -> torch.Tensor | None:
    """Not moved: they belong to the tokens that are read. None unless every sequence has them."""
    given = [experts for experts in chosen if experts is not None]
    return torch.from_numpy(np.concatenate(given)) if len(given) == len(chosen) else None


def _joined(sequences: Sequence[NDArray[Any]]) -> torch.Tensor:
    """Sequences end to end, each moved one place ahead: what belongs to token t + 1 stands at t, zeros at the last.

    >>> _joined([np.array([7, 8, 9]), np.array([1, 2])])
    tensor([8, 9, 0, 2, 0])
    """
    return torch.from_numpy(
        np.concatenate([part for values in sequences for part in (values[1:], np.zeros_like(values[:1]))])
    )


def filler() -> MicroBatch:
    """A micro-batch without loss, for a rank that has fewer than its peers."""
    zero, false = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    token = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(token, token, false, zero, zero, zero, token - 1, zero, (1,))
