"""The data that flows through a step. Suffix _T: one entry a token of a micro-batch, whole sequences end to end."""

from dataclasses import dataclass, fields, replace
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from gppo_verifiers.types import Task, Verdict
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A problem: its tokens, how to judge an answer, and the reference answer where one is known.

    answer_ids: the reference response, end token included; empty where there is none.
    """

    id: str
    token_ids: tuple[int, ...]
    task: Task
    answer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"prompt {self.id} has no tokens")


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The K likeliest tokens of the distribution that was sampled from, at each of n places.

    ids: int32 [n, K], -1 where there is no such token (a smaller vocabulary, or a place where nothing was sampled).
    logprobs: float32 [n, K], in nats; anything at id -1.
    rest: float32 [n], log of what all tokens but these and the sampled one have together; -inf where nothing is left.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    rest: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.ids.shape != self.logprobs.shape or self.ids.shape[:1] != self.rest.shape:
            raise ValueError(f"top tokens differ in shape: {self.ids.shape}, {self.logprobs.shape}, {self.rest.shape}")

    def after(self, places: int) -> "TopTokens":
        """The same behind `places` empty ones."""
        count = self.ids.shape[1]
        return TopTokens(
            np.concatenate([np.full((places, count), -1, np.int32), self.ids]),
            np.concatenate([np.zeros((places, count), np.float32), self.logprobs]),
            np.concatenate([np.zeros(places, np.float32), self.rest]),
        )


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One sampled sequence, prompt included. All arrays have one length n.

    token_ids: int64 [n].
    sampler_logprobs: float32 [n], log-probability (nats) of token i under the policy that sampled it;
        0 where the token was not sampled.
    trainable: bool [n], tokens the policy sampled and may be trained on.
    policy_versions: int64 [n], the policy version that sampled the token; -1 where none did.
    finish: "stop" at an end token, "length" at the token limit.
    top: of the n tokens, where they were asked for.
    experts: int16 [n, layers, k], the experts that each layer sent token i to when it was read; -1 in layers without
        experts, and for tokens that were not read, such as the last. None where they were not asked for.
    penalty: what its reward is less than the verdict's score.
    """

    token_ids: NDArray[np.int64]
    sampler_logprobs: NDArray[np.float32]
    trainable: NDArray[np.bool_]
    policy_versions: NDArray[np.int64]
    finish: str
    verdict: Verdict
    top: TopTokens | None = None
    experts: NDArray[np.int16] | None = None
    penalty: float = 0.0

    def __post_init__(self) -> None:
        arrays = [self.sampler_logprobs, self.trainable, self.policy_versions]
        arrays += [self.top.rest] if self.top is not None else []
        arrays += [self.experts] if self.experts is not None else []
        if any(len(array) != len(self.token_ids) for array in arrays):
            raise ValueError(f"trajectory arrays differ in length: {[len(self.token_ids), *map(len, arrays)]}")
        if len(self.token_ids) and self.trainable[0]:
            raise ValueError("a sequence's first token has no prediction and cannot be trainable")
        if self.finish not in {"stop", "length"}:
            raise ValueError(f"finish must be 'stop' or 'length', got {self.finish!r}")


@dataclass(frozen=True, eq=False)
class Group:
    """All trajectories of one prompt: the unit of advantages and of filtering."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """A reward a trajectory; None where the verifier failed, which is no reward at all."""
        return tuple(
            None if (score := trajectory.verdict.score) is None else score - trajectory.penalty
            for trajectory in self.trajectories
        )


@dataclass(frozen=True, eq=False)
class TopStreams:
    """`TopTokens` of a micro-batch's predictions: ids_TK int32, logprobs_TK and rest_T float32."""

    ids_TK: torch.Tensor
    logprobs_TK: torch.Tensor
    rest_T: torch.Tensor


@dataclass(frozen=True, eq=False)
class PastRows:
    """The distributions that an earlier policy gave to N of a micro-batch's predictions with loss, to be worked out
    again: all of them, or a sample.

    Under context parallelism, of those of this process alone.

    picked_N: int64, on the CPU; at which of the T positions they are. hidden_NH: its rows before the head, on the CPU.
    weight_VH: this process's shard of its head, on the model's device, one copy for all micro-batches.
    top_logits_N, top_logprobs_N: float32, on the CPU; as the head gave them.
    """

    picked_N: torch.Tensor
    hidden_NH: torch.Tensor
    weight_VH: torch.Tensor
    top_logits_N: torch.Tensor
    top_logprobs_N: torch.Tensor


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Whole sequences end to end. Position t holds what concerns the prediction of the token after t.

    tokens_T, labels_T: int64 [T]; labels_T[t] is the next token of the same sequence (0 at its last position).
    mask_T: bool [T], predictions that carry loss.
    sampler_logprobs_T, anchor_logprobs_T, advantages_T: float32 [T], 0 outside the mask.
    policy_versions_T: int64 [T], the policy version that sampled the predicted token; -1 where none did.
    share_T: float32 [T], the prediction's share in the global mean (`objective.reduce`).
    reference_logprobs_T: float32 [T], 0 outside the mask; None where no reference policy scored the batch.
    top, past: the anchor policy's distributions, where the estimator asks for them; what the policy measured itself
        is on the last pipeline stage alone.
    experts_TLK: int16 [T, layers, k], where the sampler sent each of tokens_T in each layer, as in `Trajectory`; None
        where it was not asked.
    lengths: tokens of each sequence; their sum is T. A micro-batch is never empty: filler sequences have no mask.
    """

    tokens_T: torch.Tensor
    labels_T: torch.Tensor
    mask_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    anchor_logprobs_T: torch.Tensor
    advantages_T: torch.Tensor
    policy_versions_T: torch.Tensor
    share_T: torch.Tensor
    lengths: tuple[int, ...]
    reference_logprobs_T: torch.Tensor | None = None
    top: TopStreams | None = None
    past: PastRows | None = None
    experts_TLK: torch.Tensor | None = None

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, torch.Tensor):
                continue
            if len(value) != total or value.ndim != (3 if field.name == "experts_TLK" else 1):
                raise ValueError(f"{field.name} has shape {tuple(value.shape)}, but the sequences hold {total} tokens")

    def with_anchor(self, anchor_logprobs_T: torch.Tensor) -> Self:
        """The same micro-batch with another anchor policy's log-probs."""
        return replace(self, anchor_logprobs_T=torch.where(self.mask_T, anchor_logprobs_T, 0.0))

    def with_reference(self, reference_logprobs_T: torch.Tensor) -> Self:
        """The same micro-batch with a reference policy's log-probs."""
        return replace(self, reference_logprobs_T=torch.where(self.mask_T, reference_logprobs_T, 0.0))


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """One optimizer step's data on this rank. Every data-parallel rank has the same number of micro-batches.

    tokens, sequences: **global** counts of predictions with loss and of sequences that have one.
    """

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    sequences: int


class Team(Protocol):
    """Some of the run's processes, in a fixed order, that exchange small Python values."""

    @property
    def rank(self) -> int:
        """This process's place, 0 to size - 1."""
        ...

    @property
    def size(self) -> int: ...

    def gather(self, value: T) -> list[T]:
        """Collective: every member's value, in order, to every member."""
        ...


def share_of(count: int, team: Team) -> range:
    """Which of `count` things are this member's: one run of neighbours each, in the members' order, as even as can be.

    Seven things for three members: 0-1, 2-3, 4-6.
    """
    return range(count * team.rank // team.size, count * (team.rank + 1) // team.size)


def turns_of(count: int, team: Team) -> range:
    """Which of `count` things are this member's when they are dealt out in turn: 0-3-6, 1-4 and 2-5 of seven.

    A run of neighbours, dealt out, leaves every member an even part of that run.
    """
    return range(team.rank, count, team.size)


@dataclass(frozen=True)
class Alone:
    """The team of one process."""

    rank: int = 0
    size: int = 1

    def gather(self, value: T) -> list[T]:
        return [value]


class Topology(Protocol):
    """How the run's processes share the work.

    world: all of them.
    data: one member of each replica of the model, those with this process's place inside the replica.
    replica: the processes that hold one copy of the model between them (tensor x pipeline).
    """

    @property
    def world(self) -> Team: ...

    @property
    def data(self) -> Team: ...

    @property
    def replica(self) -> Team: ...


@dataclass(frozen=True)
class Described:
    """A tensor to be sent: its Hugging Face name, dtype (as in `float32`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a group meet: `size` of them, of which rank 0 listens at address:port."""

    address: str
    port: int
    size: int
    name: str
    backend: str
