"""Packing: positions, labels and denominators by hand, and what must hold for any rollout."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gppo_verifiers.types import Status, Task, Verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from gppo_megatron.data.packing import Packer, filler
from gppo_megatron.errors import DataError
from gppo_megatron.types import Alone, Group, MicroBatch, Prompt, Trajectory


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


@dataclass(frozen=True)
class Peers:
    """A data team in which the other members always say `others`."""

    others: tuple[Any, ...]
    rank: int = 0

    @property
    def size(self) -> int:
        return 1 + len(self.others)

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


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
    packer = Packer(1, 4, "token_mean", None, Peers(((10, 3, 5), (0, 0, 0))))
    (batch,) = packer.pack([group(trajectory(1, 1))], [(1.0,)])
    assert (batch.tokens, batch.sequences, len(batch.micro_batches)) == (11, 4, 5)
    assert not any(micro.mask_T.any() for micro in batch.micro_batches[1:])
    assert batch.micro_batches[0].share_T.sum() == pytest.approx(1 / 11)


def test_a_rank_without_any_answer_still_has_a_micro_batch() -> None:
    (batch,) = Packer(1, 4, "token_mean", None, Alone()).pack([group(trajectory(1, 1))], [(None,)])
    assert [micro.lengths for micro in batch.micro_batches] == [(1,)]
    assert batch.tokens == 0


def test_a_sequence_beyond_the_budget_is_named() -> None:
    with pytest.raises(DataError, match=r"a sequence of 9 tokens exceeds batch\.micro_batch_tokens = 8"):
        Packer(1, 8, "token_mean", None, Alone()).pack([group(trajectory(4, 5))], [(1.0,)])


@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=12),
    budget=st.integers(14, 60), updates=st.integers(1, 4), aggregation=st.sampled_from(["token_mean", "sequence_mean"]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_any_rollout(shapes: list[tuple[int, int]], budget: int, updates: int, aggregation: Any) -> None:
    groups = [group(trajectory(*shape, first=100 * index)) for index, shape in enumerate(shapes)]
    batches = Packer(updates, budget, aggregation, None, Alone()).pack(groups, [(1.0,)] * len(groups))
    assert len(batches) == updates
    micro_batches: list[MicroBatch] = [micro for batch in batches for micro in batch.micro_batches]
    assert all(len(micro.lengths) * max(micro.lengths) <= budget for micro in micro_batches)
    kept = [tokens for micro in micro_batches for tokens in torch.split(micro.tokens_T, list(micro.lengths))]
    expected = [list(range(100 * i, 100 * i + sum(shape))) for i, shape in enumerate(shapes)]
    assert sorted(tokens.tolist() for tokens in kept if tokens.tolist() != [0] or [0] in expected) == sorted(expected)
    for batch in batches:
        shares = sum(float(micro.share_T.double().sum()) for micro in batch.micro_batches)
        assert shares == pytest.approx(1.0 if batch.tokens else 0.0, abs=1e-5)


def test_filler_has_no_loss() -> None:
    assert not filler().mask_T.any()
    assert float(filler().share_T.sum()) == 0
