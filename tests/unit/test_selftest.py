"""What the self-test runs and when it fails; that it runs is tested with several processes."""

import math
from pathlib import Path

import pytest

from gppo_megatron.cli import main
from gppo_megatron.errors import ConfigError
from gppo_megatron.policy.megatron import optimizer_state
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.selftest import Difference, layouts_for, report, run


@pytest.mark.parametrize("processes", [1, 2, 4, 6, 8])
def test_every_layout_takes_all_processes_and_occurs_once(processes: int) -> None:
    layouts = list(layouts_for(processes))
    assert {layout.parallel.processes for layout in layouts} == {processes}
    assert len(set(layouts)) == len(layouts) == len({str(layout) for layout in layouts})


def test_four_processes_try_everything() -> None:
    names = {str(layout) for layout in layouts_for(4)}
    assert {
        "tensor 4", "pipeline 4", "context 4", "data 4", "tensor 2, pipeline 2", "tensor 2, context 2, sequence",
        "pipeline 2, data 2, virtual_stages 2", "data 4, distributed_optimizer", "data 4, recompute full",
        "tensor 2, data 2, overlap_gradients, overlap_parameters, distributed_optimizer",
    } <= names  # fmt: skip


@pytest.mark.parametrize(
    ("difference", "passes"),
    [
        ({}, True),
        ({"loss": 1e-4}, False),
        ({"norm": 1e-4}, False),
        ({"weights": 1e-4}, False),
        ({"weights": math.nan}, False),
        ({"norm": math.nan}, False),
        ({"same": False}, False),
        ({"same": None}, True),
    ],
)
def test_any_difference_fails(difference: dict[str, float], passes: bool) -> None:
    plain = {"loss": 0.0, "norm": 1e-6, "weights": 1e-6, "same": True}
    assert Difference("tensor 2", **{**plain, **difference}).passes(2e-5) is passes  # type: ignore[arg-type]


def test_a_resumed_step_that_differs_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_steps = optimizer_state._set_steps
    monkeypatch.setattr(optimizer_state, "_set_steps", lambda state, _, adam: set_steps(state, 0, adam))
    assert not report(1, CPU, 2e-5, speaks=True)
    _, begun, resumed, moved, *_ = capsys.readouterr().out.splitlines()
    assert begun.endswith("  same")
    assert resumed.endswith("  DIFFER  FAILED")
    assert moved.endswith("  FAILED")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--folder: there is no folder .*nowhere; name one that all nodes share"):
        next(run(1, CPU, tmp_path / "nowhere"))


def test_torchrun_decides_the_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["selftest", "--nproc", "4"]) == 2
    assert capsys.readouterr().err == "--nproc: 2 processes were started (got 4); leave it out\n"
