"""Which keys may differ when a run goes on."""

from dataclasses import replace

import pytest

from gppo_megatron.config.changes import FREE, check_changes, is_free
from gppo_megatron.config.load import _paths
from gppo_megatron.config.schema import (
    EmbeddedRollout,
    HfModel,
    Memory,
    Optimizer,
    Parallel,
    ReasoningGymData,
    RunConfig,
    Save,
    TinyModel,
    Warmup,
)
from gppo_megatron.errors import ConfigError

SAVED = RunConfig(
    run="runs/a",
    steps=10,
    model=TinyModel(),
    data=ReasoningGymData(task="chain_sum"),
    rollout=EmbeddedRollout(max_new_tokens=4),
)


def problems(given: RunConfig, saved: RunConfig = SAVED) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_changes(saved, given, "run --resume")
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_what_is_learned_cannot_change() -> None:
    given = replace(SAVED, seed=2, optimizer=Optimizer(lr=2e-6), rollout=EmbeddedRollout(max_new_tokens=5))
    assert problems(given) == [
        "rollout.max_new_tokens: cannot change when a run goes on: 4 when the checkpoint was saved (got 5)",
        "seed: cannot change when a run goes on: 1 when the checkpoint was saved (got 2)",
        "optimizer.lr: cannot change when a run goes on: 1e-06 when the checkpoint was saved (got 2e-06)",
    ]
    assert [line.split(":")[0] for line in problems(replace(SAVED, model=HfModel("x"), warmup=Warmup(3)))] == [
        "model",
        "warmup",
    ]


def test_where_and_how_fast_may_change() -> None:
    given = replace(SAVED, run="runs/b", steps=20, threads=2, parallel=Parallel(tensor=2), save=Save(keep=5))
    check_changes(SAVED, given, "run --resume")


@pytest.mark.parametrize(("schedule", "decay_steps", "free"), [("linear", None, False), ("cosine", 99, True)])
def test_a_schedule_that_ends_with_the_run_fixes_its_length(schedule: str, decay_steps: int | None, free: bool) -> None:
    saved = replace(SAVED, optimizer=Optimizer(schedule=schedule, decay_steps=decay_steps))  # type: ignore[arg-type]
    given = replace(saved, steps=20)
    if free:
        check_changes(saved, given, "run --resume")
    else:
        assert [line.split(":")[0] for line in problems(given, saved)] == ["steps"]


def test_how_processes_share_the_work_may_change() -> None:
    given = replace(SAVED, parallel=Parallel(tensor=2, expert=2), memory=Memory(distributed_optimizer=True))
    check_changes(SAVED, given, "run --resume")


def test_every_free_key_exists() -> None:
    paths = set(_paths(RunConfig, ""))
    known = {free for free in FREE for path in paths if is_free(path) and path.startswith(free)}
    assert known == set(FREE)
    assert not is_free("runner")
    assert not is_free("model.path")
