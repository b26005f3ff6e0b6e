"""Packed sequences: none sees another, positions restart with each, and the two arrangements give one answer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.arrangement import ELSEWHERE, Arrangement, EndToEnd, Shares, SideBySide
from gppo_megatron.policy.megatron.attention import slices
from gppo_megatron.policy.megatron.update import MegatronPolicy
from gppo_megatron.types import MicroBatch, TrainBatch
from tests.distributed.layouts import OPTIMIZER, TEMPERATURE
from tests.distributed.reference import VOCAB, batch_of, make_sensitive, random_model
from tests.single_process import model_of, world_of_one

OBJECTIVE = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
PERTURBED = 3


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = random_model("qwen3", tied=False)
    make_sensitive(model, qk_norm=True)
    model.save_pretrained(path)  # type: ignore[operator]
    return path


def perturbed(batch: MicroBatch) -> MicroBatch:
    """Every token of one sequence replaced, and what it is to predict."""
    start = sum(batch.lengths[:PERTURBED])
    inside_T = torch.zeros_like(batch.mask_T)
    inside_T[start : start + batch.lengths[PERTURBED]] = True
    return replace(
        batch,
        tokens_T=torch.where(inside_T, (batch.tokens_T + 7) % VOCAB, batch.tokens_T),
        labels_T=torch.where(inside_T, (batch.labels_T + 7) % VOCAB, batch.labels_T),
    )


def embedding_gradients(folder: Path, batch: MicroBatch) -> list[torch.Tensor]:
    """d loss / d embedding of every token, a tensor a sequence."""
    model = model_of(folder, TEMPERATURE)
    kept: list[torch.Tensor] = []
    embedding = model.chunks[0].module.embedding
    embedding.register_forward_hook(lambda *call: call[-1].register_hook(kept.append) and None)
    MegatronPolicy(model, OPTIMIZER, 10).update(TrainBatch((batch,), 1, 1), OBJECTIVE)
    (gradient_S1H,) = kept
    return list(torch.split(gradient_S1H.squeeze(1), list(batch.lengths)))


def test_perturbing_one_sequence_leaves_every_bit_of_the_others_gradients(folder: Path) -> None:
    (batch,) = batch_of().micro_batches
    before, after = embedding_gradients(folder, batch), embedding_gradients(folder, perturbed(batch))
    assert len(before) == 16
    assert sum(bool(gradient.any()) for gradient in before) > 12, "the trust region masks only a few whole sequences"
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old, new) == (index != PERTURBED)


def test_a_sequence_without_loss_adds_no_bit_to_the_weights_gradient(folder: Path) -> None:
    (batch,) = batch_of().micro_batches
    start = sum(batch.lengths[:PERTURBED])
    mask_T = batch.mask_T.clone()
    mask_T[start : start + batch.lengths[PERTURBED]] = False
    silent = replace(batch, mask_T=mask_T, share_T=torch.where(mask_T, batch.share_T, 0.0))
    exported = []
    for micro in (silent, perturbed(silent)):
        model = model_of(folder, TEMPERATURE)
        MegatronPolicy(model, OPTIMIZER, 10).update(TrainBatch((micro,), 1, 1), OBJECTIVE)
        exported.append({name: tensor.clone() for name, tensor in model.export(lambda weight: weight.main_grad)})
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


def logprobs(folder: Path, batch: MicroBatch, arrange: type[EndToEnd] | type[SideBySide]) -> torch.Tensor:
    model = model_of(folder, TEMPERATURE, arrange=arrange)
    scored = MegatronPolicy(model, OPTIMIZER, 10).annotate(TrainBatch((batch,), 1, 1))
    return scored.micro_batches[0].anchor_logprobs_T


def test_both_arrangements_score_alike(folder: Path) -> None:
    (batch,) = batch_of().micro_batches
    packed_T, padded_T = logprobs(folder, batch, EndToEnd), logprobs(folder, batch, SideBySide)
    torch.testing.assert_close(packed_T, padded_T, rtol=0, atol=5e-6)
    assert packed_T.unique().numel() > 50


def test_slices_by_hand() -> None:
    assert slices([8], size=2, rank=0).tolist() == [0, 1, 6, 7]
    assert slices([8], size=2, rank=1).tolist() == [2, 3, 4, 5]
    assert slices([4, 8], size=2, rank=1).tolist() == [1, 2, 6, 7, 8, 9]
    assert slices([3, 2], size=1, rank=0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("arrange", [EndToEnd, SideBySide])
@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 2)])
def test_every_token_stands_in_one_place(arrange: type[EndToEnd] | type[SideBySide], context: int, tensor: int) -> None:
    (batch,) = batch_of().micro_batches
    found_T = torch.zeros_like(batch.tokens_T)
    own_T = torch.cat([torch.arange(length) for length in batch.lengths])
    for rank in range(context):
        arrangement: Arrangement = arrange(Shares(context, rank, tensor))
        grid = arrangement.place(batch)
        assert grid.length % tensor == 0
        here_T = grid.place_T != ELSEWHERE
        places = grid.place_T[here_T]
        found_T += here_T
        assert torch.equal(grid.tokens_BS.T.flatten()[places], batch.tokens_T[here_T])
        assert torch.equal(grid.positions_BS.T.flatten()[places], own_T[here_T])
    assert found_T.tolist() == [1] * len(found_T), "on exactly one process"


def test_a_grid_can_be_made_longer() -> None:
    (batch,) = batch_of().micro_batches
    for arrange in (EndToEnd, SideBySide):
        assert arrange(Shares(2, 1, 2)).place(batch, at_least=400).length * 2 == 400
