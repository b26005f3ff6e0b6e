"""What a checkpoint holds besides the policy."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gppo_megatron.errors import CheckpointError
from gppo_megatron.train_state import (
    TrainState,
    read_train_state,
    restore_random_state,
    seed_generators,
    write_random_state,
)

STATE = TrainState("train", 4, 14, 2, metrics_bytes=60, rollouts={"epoch": 1, "offset": 3})


def test_a_state_reads_back(tmp_path: Path) -> None:
    STATE.write(tmp_path)
    assert read_train_state(tmp_path) == STATE


@pytest.mark.parametrize("content", ["", "{}", "[]", json.dumps({"format": 1, "stage": "train"}), '{"format": 9}'])
def test_a_state_that_cannot_be_read_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "train_state.json").write_text(content)
    with pytest.raises(CheckpointError, match="train_state.json"):
        read_train_state(tmp_path)


def test_weights_alone_are_no_state(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run can go on"):
        read_train_state(tmp_path)


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002


def test_random_numbers_go_on(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second number behind, which belongs to the state
    write_random_state(tmp_path, 3)
    expected = [drawn(), drawn()]
    drawn()
    restore_random_state(tmp_path, 3)
    assert [drawn(), drawn()] == expected


def test_a_seed_begins_every_generator() -> None:
    numbers = []
    for seed in (7, 7, 2**63 - 1):
        seed_generators(seed)
        numbers.append(drawn())
    assert numbers[0] == numbers[1]
    assert all(one != other for one, other in zip(numbers[0], numbers[2], strict=True))


def test_random_numbers_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank-0\.json"):
        restore_random_state(tmp_path, 0)
    write_random_state(tmp_path, 0)
    file = tmp_path / "random" / "rank-0.json"
    file.write_text(file.read_text().replace("MT19937", "other"))
    with pytest.raises(CheckpointError, match=r"rank-0\.json"):
        restore_random_state(tmp_path, 0)
