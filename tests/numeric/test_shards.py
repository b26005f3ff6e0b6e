"""The policy in Megatron's distributed format, in one process: what is read goes on as what was written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gppo_megatron.config.schema import Memory, Optimizer
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron import shards
from gppo_megatron.policy.megatron.shards import complete, read_shards, weights_state, write_shards
from gppo_megatron.policy.megatron.update import MegatronPolicy
from tests.distributed.reference import batch_of, random_model
from tests.numeric.test_policy import GPPO
from tests.single_process import model_of, world_of_one

OPTIMIZER = Optimizer(lr=1e-2, min_lr=1e-3, schedule="cosine", warmup_steps=3, decay_steps=9, weight_decay=0.1)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_model("qwen3", tied=True).save_pretrained(folder)
    return folder


def policy_of(folder: Path, dtype: torch.dtype = torch.float32, shared: bool = False) -> MegatronPolicy:
    """shared: the optimizer's state, among a single replica."""
    model = model_of(folder, dtype=dtype, memory=Memory(distributed_optimizer=shared))
    return MegatronPolicy(model, OPTIMIZER, optimizer_steps=10)


def updated(policy: MegatronPolicy, steps: int) -> list[dict[str, float]]:
    return [policy.update(batch_of(), GPPO).flat() for _ in range(steps)]


def weights_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def assert_equal(one: MegatronPolicy, other: MegatronPolicy) -> None:
    weights = weights_of(other)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(one).items())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_policy_goes_on_bit_for_bit(folder: Path, tmp_path: Path, dtype: torch.dtype, asynchronous: bool) -> None:
    policy = policy_of(folder, dtype)
    updated(policy, 2)
    calls = write_shards(tmp_path, policy.state(), asynchronous)
    at_once = updated(policy, 3)  # the weights move while an asynchronous writer is at work
    if calls is not None:
        assert complete(calls, wait=True)
    other = policy_of(folder, dtype)
    updated(other, 1)  # whatever it was before
    other.restore(read_shards(tmp_path, other.state(loading=True), every=True))
    assert other.version == 2
    assert str(updated(other, 3)) == str(at_once)  # text: a NaN equals no number
    assert_equal(policy, other)
    assert other.version == 5


@pytest.mark.filterwarnings(
    "ignore:.*is deprecated:FutureWarning", "ignore:The .grad attribute of a Tensor"
)  # Megatron-Core
@pytest.mark.parametrize("reader", [False, True])
@pytest.mark.parametrize("writer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_shared_optimizer_and_one_that_is_not_read_each_other(
    folder: Path, tmp_path: Path, dtype: torch.dtype, writer: bool, reader: bool
) -> None:
    policy = policy_of(folder, dtype, writer)
    updated(policy, 2)
    write_shards(tmp_path, policy.state(), asynchronous=False)
    other = policy_of(folder, dtype, reader)
    other.restore(read_shards(tmp_path, other.state(loading=True), every=True))
    expected = [step["optimizer/grad_norm"] for step in updated(policy, 3)]
    assert [step["optimizer/grad_norm"] for step in updated(other, 3)] == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_of_another_version_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(folder)
    updated(policy, 1)
    monkeypatch.setattr(shards, "CONTENT", shards.RESHARDABLE)
    write_shards(tmp_path, policy.state(), asynchronous=False)
    with pytest.raises(CheckpointError, match="not written by this version of gppo_megatron.*`gppo convert`"):
        read_shards(tmp_path, policy_of(folder).state(loading=True), every=True)


def test_the_learning_rate_goes_on(folder: Path, tmp_path: Path) -> None:
    whole = [line["optimizer/lr"] for line in updated(policy_of(folder), 8)]
    assert len(set(whole)) == 8
    rates: list[float] = []
    for part in range(4):
        policy = policy_of(folder)
        if part:
            before = tmp_path / str(part - 1)
            policy.restore(read_shards(before, policy.state(loading=True), every=True))
        rates += [line["optimizer/lr"] for line in updated(policy, 2)]
        (tmp_path / str(part)).mkdir()
        write_shards(tmp_path / str(part), policy.state(), asynchronous=False)
    assert rates == whole


def test_weights_alone_can_be_read(folder: Path, tmp_path: Path) -> None:
    policy = policy_of(folder)
    updated(policy, 1)
    write_shards(tmp_path, policy.state(), asynchronous=False)
    model = model_of(folder)
    read_shards(tmp_path, weights_state(model.chunks), every=False)
    expected = weights_of(policy)
    assert all(name in expected for name, _ in model.export())


def other_model(folder: Path, **changes: Any) -> Path:
    config = random_model("qwen3", tied=True).config
    for name, value in changes.items():
        setattr(config, name, value)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        {"intermediate_size": 64},
        {"tie_word_embeddings": False},
    ],
)
def test_another_model_is_refused(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    policy = policy_of(folder)
    updated(policy, 1)
    (tmp_path / "shards").mkdir()
    write_shards(tmp_path / "shards", policy.state(), asynchronous=False)
    other = policy_of(other_model(tmp_path / "other", **changes))
    with pytest.raises(CheckpointError, match="does not fit this run"):
        read_shards(tmp_path / "shards", other.state(loading=True), every=True)


def test_a_policy_without_its_optimizer_is_refused(folder: Path, tmp_path: Path) -> None:
    policy = policy_of(folder)
    updated(policy, 1)
    state = policy.state()
    del state["optimizer"]
    write_shards(tmp_path, state, asynchronous=False)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        read_shards(tmp_path, policy_of(folder).state(loading=True), every=True)


def test_nan_in_a_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    policy = policy_of(folder)
    updated(policy, 1)
    state = policy.state()
    with torch.no_grad():
        state["model"]["decoder.final_layernorm.weight"].data[3] = torch.nan
    write_shards(tmp_path, state, asynchronous=False)
    other = policy_of(folder)
    with pytest.raises(CheckpointError, match=r"NaN or infinity in the checkpoint's decoder.final_layernorm.weight"):
        other.restore(read_shards(tmp_path, other.state(loading=True), every=True))


def test_a_writer_that_fails_is_named(folder: Path, tmp_path: Path) -> None:
    policy = policy_of(folder)
    updated(policy, 1)
    (tmp_path / "__0_0.distcp").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot be written: rank 0: Worker failure: .*__0_0\.distcp"):
        write_shards(tmp_path, policy.state(), asynchronous=False)
