"""Buckets of a plan, and what an exporter refuses."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron import export, weights
from gppo_megatron.policy.megatron.export import PlannedTensor, WeightExporter, cut_buckets, value_of
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.mapping.layouts import Replicated
from gppo_megatron.policy.megatron.mapping.table import Rule
from tests.single_process import model_of, world_of_one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse")
    create_tiny(TinyModel(experts=3, expert_ffn=20), path, seed=1)
    return path


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def planned(number: int, elements: int, stage: int, expert_rank: int | None, dtype: torch.dtype) -> PlannedTensor:
    return PlannedTensor(Rule(str(number), (str(number),), Replicated()), stage, expert_rank, (elements,), dtype)


HOMES = st.tuples(
    st.integers(1, 40),
    st.integers(0, 1),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


@given(st.lists(HOMES, max_size=30), st.integers(1, 200))
def test_buckets_hold_every_tensor_once_and_in_order(homes: list[tuple], most_bytes: int) -> None:  # type: ignore[type-arg]
    plan = [planned(number, *home) for number, home in enumerate(homes)]
    buckets = cut_buckets(plan, most_bytes)
    assert [tensor for bucket in buckets for tensor in bucket] == plan
    for bucket in buckets:
        assert len({tensor.home for tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(tensor.bytes for tensor in bucket) <= most_bytes
    for before, after in zip(buckets, buckets[1:], strict=False):
        full = sum(tensor.bytes for tensor in before) + after[0].bytes > most_bytes
        assert full or before[0].home != after[0].home, "buckets must not be smaller than they need be"


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 20_000, 10**9])
def test_no_tensor_is_lost_where_a_bucket_ends(folder: Path, bucket_bytes: int) -> None:
    model = model_of(folder)
    exporter = WeightExporter(model.chunks, model.architecture, bucket_bytes)
    source = HfReader(folder)
    exported = [(name, tensor) for name, tensor in exporter()]
    assert len(exported) == len(source.names) == len(dict(exported))
    assert all(torch.equal(tensor, source.read(name)) for name, tensor in exported)


def test_exported_tensors_do_not_follow_the_model(folder: Path) -> None:
    model = model_of(folder)
    exported = dict(model.export())
    before = {name: tensor.clone() for name, tensor in exported.items()}
    with torch.no_grad():
        for parameter in model.chunks[0].module.parameters():
            parameter.zero_()
    assert all(torch.equal(exported[name], tensor) for name, tensor in before.items())


def test_a_parameter_that_is_nowhere_is_named(folder: Path) -> None:
    model = model_of(folder)
    more = dataclasses.replace(model.architecture, layers=3)
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.2\.input_layernorm\.weight: no process holds"):
        WeightExporter(model.chunks, more)


def test_ranks_that_disagree_on_the_plan_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(folder)
    gather = export.dist.all_gather_object

    def altered(values: list[object], value: object, **options: object) -> None:
        gather(values, value, **options)
        if isinstance(value, str):
            values.append("another")

    monkeypatch.setattr(export.dist, "all_gather_object", altered)
    with pytest.raises(CheckpointError, match="disagree on the model's parameters: plans [0-9a-f]{64}, another"):
        WeightExporter(model.chunks, model.architecture)


def test_a_parameter_or_buffer_without_a_rule_is_refused(folder: Path) -> None:
    chunks, architecture = model_of(folder).chunks, read_architecture(folder)
    router = chunks[0].module.decoder.layers[1].mlp.router
    del router.expert_bias
    router.register_buffer("expert_bias", torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"no rule for decoder\.layers\.1\.mlp\.router\.expert_bias"):
        weights.load(chunks, architecture, HfReader(folder))


def test_weights_in_fp8_are_exported_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert value_of(parameter).data_ptr() == parameter.data_ptr()
    monkeypatch.setattr(export, "is_float8tensor", lambda tensor: True)
    monkeypatch.setattr(export, "dequantize_fp8_tensor", lambda tensor: tensor * 3)
    assert value_of(parameter).tolist() == [3, 3]
