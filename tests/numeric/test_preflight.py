"""The preflight in one process; with several it runs in every whole-run test."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from gppo_megatron.errors import GppoError
from gppo_megatron.policy.megatron import preflight
from gppo_megatron.types import Alone
from tests.single_process import CPU, world_of_one


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def test_a_working_network_is_one_line() -> None:
    assert preflight._try([0], None, CPU) is None
    assert preflight.preflight(CPU, Alone()).startswith("preflight  1 processes on 1 node (")


def test_wrong_sums_and_gathers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(2))
        assert preflight._try([0], None, CPU) == "the sum of rank + 1 came out as 2 instead of 1"
    monkeypatch.setattr(dist, "all_gather", lambda parts, mine, group: parts[0].zero_())
    assert preflight._try([0], None, CPU) == "gathering got 0 from rank 0 instead of 1"


def test_a_wrong_network_ends_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(preflight, "_try", lambda ranks, group, device: "no answer")
    with pytest.raises(GppoError, match=r"rank 0 \(.*\): all processes \[0, 1\]: no answer; .*tensor \[0, 1\]"):
        preflight.preflight(CPU, Alone())
    assert torch.distributed.is_initialized()
