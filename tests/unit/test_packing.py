"""Packing: positions, labels and denominators by hand, and what must hold for any rollout."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from gppo_verifiers.types import Status, Task, Verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from gppo_megatron.data.balance import PackedRoom, PaddedRoom, Room, Work
from gppo_megatron.data.packing import Packer, filler
from gppo_megatron.errors import DataError
from gppo_megatron.types import Alone, Group, MicroBatch, Prompt, TopTokens, TrainBatch, Trajectory


def trajectory(prompt: int, response: int, first: int = 1) -> Trajectory:
    """Tokens first, first + 1, ...; the log-prob of token i is -i / 10."""
    trainable = np.arange(prompt + response) >= prompt
    return Trajectory(
        token_ids=np.arange(first, first + prompt + response),
        sampler_logprobs=np.where(trainable, -np.arange(prompt + response) / 10, 0).astype(np.float32),
        trainable=trainable,
        policy_versions=np.where(trainable, 3, -1),
        finish="stop",
        verdict=Verdict(1.0, Status.GRADED),
    )


def group(*trajectories: Trajectory) -> Group:
    return Group(Prompt("p", (1,), Task("none")), trajectories)


@dataclass(frozen=True, eq=False)
class Threads:
    """A data team whose members are threads of this process."""

    rank: int
    size: int
    barrier: Barrier
    values: list[Any]

    def gather(self, value: Any) -> list[Any]:
        self.values[self.rank] = value
        self.barrier.wait()
        gathered = list(self.values)
        self.barrier.wait()
        return gathered


def packed_by_all(
    packer: Packer, rollouts: Sequence[tuple[list[Group], list[tuple[float, ...]]]]
) -> list[list[TrainBatch]]:
    """What each member of a team packs, one member a rollout."""
    barrier, values = Barrier(len(rollouts), timeout=60), [None] * len(rollouts)
    teams = [Threads(rank, len(rollouts), barrier, values) for rank in range(len(rollouts))]
    with ThreadPoolExecutor(len(rollouts)) as pool:
        futures = [
            pool.submit(replace(packer, data_team=team).pack, *rollout)
            for team, rollout in zip(teams, rollouts, strict=True)
        ]
        return [future.result() for future in futures]


def rollout(*shapes: tuple[int, int]) -> tuple[list[Group], list[tuple[float, ...]]]:
    return [group(*(trajectory(*shape) for shape in shapes))], [(1.0,) * len(shapes)]


def test_one_micro_batch_by_hand() -> None:
    packer = Packer(1, 100, "token_mean", None, Alone())
    (batch,) = packer.pack([group(trajectory(2, 2), trajectory(1, 2, first=11))], [(0.5, -1.0)])
    (micro,) = batch.micro_batches
    assert micro.lengths == (4, 3)
    assert micro.tokens_T.tolist() == [1, 2, 3, 4, 11, 12, 13]
    assert micro.labels_T.tolist() == [2, 3, 4, 0, 12, 13, 0]
    assert micro.mask_T.tolist() == [False, True, True, False, True, True, False]
    assert micro.advantages_T.tolist() == [0, 0.5, 0.5, 0, -1, -1, 0]
    torch.testing.assert_close(micro.sampler_logprobs_T, torch.tensor([0, -0.2, -0.3, 0, -0.1, -0.2, 0]))
    assert torch.equal(micro.anchor_logprobs_T, micro.sampler_logprobs_T)
    assert micro.policy_versions_T.tolist() == [-1, 3, 3, -1, 3, 3, -1]
    assert micro.share_T.tolist() == [0, 0.25, 0.25, 0, 0.25, 0.25, 0]
    assert (batch.tokens, batch.sequences) == (4, 2)


def with_top(item: Trajectory) -> Trajectory:
    """Token i's two likeliest have ids i and 50 + i, and their log-probs and rest say i too."""
    number = item.token_ids.astype(np.int32)
    ids = np.stack([number, number + 50], 1)
    return replace(item, top=TopTokens(ids, -ids.astype(np.float32), -number.astype(np.float32) / 2))


def test_top_tokens_move_with_the_labels() -> None:
    answers = with_top(trajectory(2, 2)), with_top(trajectory(1, 2, first=11))
    (batch,) = Packer(1, 100, "token_mean", None, Alone()).pack([group(*answers)], [(0.5, -1.0)])
    (micro,) = batch.micro_batches
    assert micro.top is not None
    assert micro.top.ids_TK.dtype == torch.int32
    assert micro.top.ids_TK[:, 0].tolist() == micro.labels_T.tolist()
    assert micro.top.ids_TK[:, 1].tolist() == [52, 53, 54, 0, 62, 63, 0]
    assert micro.top.logprobs_TK.tolist() == (-micro.top.ids_TK.float()).tolist()
    assert micro.top.rest_T.tolist() == (-micro.labels_T.float() / 2).tolist()
    (plain,) = Packer(1, 100, "token_mean", None, Alone()).pack([group(answers[0], trajectory(1, 2))], [(0.5, -1.0)])
    assert plain.micro_batches[0].top is None, "a sequence without them leaves the whole micro-batch without"


def test_experts_stay_with_the_tokens_that_were_read() -> None:
    def sent(item: Trajectory) -> Trajectory:
        return replace(item, experts=item.token_ids[:, None, None].repeat(3, 1).repeat(2, 2).astype(np.int16))

    items = [sent(trajectory(1, 2, 50)), sent(trajectory(2, 2, 60))]
    (batch,) = Packer(1, 99, "token_mean", None, Alone()).pack([group(*items)], [(1.0, 2.0)])
    (micro,) = batch.micro_batches
    assert micro.experts_TLK is not None
    assert (micro.experts_TLK.dtype, micro.experts_TLK.shape) == (torch.int16, (7, 3, 2))
    assert (micro.experts_TLK == micro.tokens_T[:, None, None]).all()
    (plain,) = Packer(1, 99, "token_mean", None, Alone()).pack([group(items[0], trajectory(2, 2))], [(1.0, 2.0)])
    assert plain.micro_batches[0].experts_TLK is None, "a sequence without them leaves the whole micro-batch without"
    with pytest.raises(ValueError, match=r"experts_TLK has shape \(6, 3, 2\), but the sequences hold 7 tokens"):
        replace(micro, experts_TLK=micro.experts_TLK[1:])
    with pytest.raises(ValueError, match="trajectory arrays differ in length"):
        replace(trajectory(1, 2), experts=np.zeros((2, 3, 2), np.int16))


def test_top_tokens_have_one_length_and_stand_behind_a_prompt() -> None:
    top = with_top(trajectory(1, 2)).top
    assert top is not None
    behind = top.after(2)
    assert behind.ids.tolist() == [[-1, -1], [-1, -1], [1, 51], [2, 52], [3, 53]]
    assert (behind.ids.dtype, behind.logprobs.dtype, behind.rest.dtype) == (np.int32, np.float32, np.float32)
    assert behind.rest.tolist() == [0, 0, -0.5, -1, -1.5]
    with pytest.raises(ValueError, match="top tokens differ in shape"):
        replace(top, rest=top.rest[:-1])
    with pytest.raises(ValueError, match="differ in length"):
        replace(trajectory(1, 2), top=behind)


def test_an_answer_without_a_verdict_leaves_loss_and_counts() -> None:
    packer = Packer(1, 100, "sequence_mean", None, Alone())
    (batch,) = packer.pack([group(trajectory(1, 4), trajectory(1, 2))], [(None, 1.0)])
    assert (batch.tokens, batch.sequences) == (2, 1)
    assert batch.micro_batches[0].lengths == (3,)


def test_a_failed_verdict_moves_no_other_answer_to_another_update() -> None:
    groups = [group(trajectory(1, 1 + i)) for i in range(4)]
    packer = Packer(2, 100, "token_mean", None, Alone())
    batches = packer.pack(groups, [(None,), (1.0,), (1.0,), (1.0,)])
    assert [batch.micro_batches[0].lengths for batch in batches] == [(3,), (5, 4)]


def test_every_rank_has_as_many_micro_batches_and_the_global_counts() -> None:
    packer = Packer(1, 4, "token_mean", None, Alone())
    ours = packed_by_all(packer, [rollout((1, 1)), rollout((1, 3), (1, 3), (1, 3), (1, 3)), rollout((1, 1))])
    batches = [batch for (batch,) in ours]
    assert [(batch.tokens, batch.sequences) for batch in batches] == [(14, 6)] * 3
    assert [len(batch.micro_batches) for batch in batches] == [2, 2, 2]
    assert sum(float(micro.share_T.sum()) for batch in batches for micro in batch.micro_batches) == pytest.approx(1)


def test_an_interleaved_pipeline_gets_whole_rounds_of_micro_batches() -> None:
    packer = Packer(1, 4, "token_mean", None, Alone(), multiple=4)
    (batch,) = packer.pack(*rollout(*[(1, 3)] * 5))
    assert [bool(micro.mask_T.any()) for micro in batch.micro_batches] == [True] * 5 + [False] * 3


def test_long_answers_of_one_rank_are_shared() -> None:
    """16 long answers came to rank 0, 16 short ones to rank 1."""
    packer = Packer(1, 400, "token_mean", None, Alone(), work=Work(linear=100))
    batches = packed_by_all(packer, [rollout(*[(1, 299)] * 16), rollout(*[(1, 9)] * 16)])
    lengths = [[length for micro in batch.micro_batches for length in micro.lengths] for (batch,) in batches]
    work = [sum(packer.work.of(length) for length in mine if length > 1) for mine in lengths]
    assert max(work) / min(work) < 1.01
    assert sorted(lengths[0] + lengths[1]) == [10] * 16 + [300] * 16


def test_a_rank_without_any_answer_still_has_a_micro_batch() -> None:
    (batch,) = Packer(1, 4, "token_mean", None, Alone()).pack([group(trajectory(1, 1))], [(None,)])
    assert [micro.lengths for micro in batch.micro_batches] == [(1,)]
    assert batch.tokens == 0


def test_a_sequence_beyond_the_budget_is_named() -> None:
    with pytest.raises(DataError, match=r"a sequence of 9 tokens exceeds batch\.micro_batch_tokens = 8"):
        Packer(1, 8, "token_mean", None, Alone()).pack([group(trajectory(4, 5))], [(1.0,)])


@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=12),
    budget=st.integers(16, 60), updates=st.integers(1, 4), aggregation=st.sampled_from(["token_mean", "sequence_mean"]),
    room=st.sampled_from([PackedRoom(), PackedRoom(4, 8), PaddedRoom(), PaddedRoom(4)]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_any_rollout(shapes: list[tuple[int, int]], budget: int, updates: int, aggregation: Any, room: Room) -> None:
    groups = [group(trajectory(*shape, first=100 * index)) for index, shape in enumerate(shapes)]
    packer = Packer(updates, budget, aggregation, None, Alone(), room=room)
    batches = packer.pack(groups, [(1.0,)] * len(groups))
    assert len(batches) == updates
    micro_batches: list[MicroBatch] = [micro for batch in batches for micro in batch.micro_batches]
    assert all(room.tokens(micro.lengths) <= budget for micro in micro_batches)
    kept = [tokens for micro in micro_batches for tokens in torch.split(micro.tokens_T, list(micro.lengths))]
    expected = [list(range(100 * i, 100 * i + sum(shape))) for i, shape in enumerate(shapes)]
    assert sorted(tokens.tolist() for tokens in kept if tokens.tolist() != [0] or [0] in expected) == sorted(expected)
    for batch in batches:
        shares = sum(float(micro.share_T.double().sum()) for micro in batch.micro_batches)
        assert shares == pytest.approx(1.0 if batch.tokens else 0.0, abs=1e-5)


def test_filler_has_no_loss() -> None:
    assert not filler().mask_T.any()
    assert float(filler().share_T.sum()) == 0
