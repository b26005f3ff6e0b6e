"""Prompts must leave room for their responses."""

import pytest
from gppo_verifiers.types import Task

from gppo_megatron.data.split import Problems, check_room
from gppo_megatron.errors import DataError
from gppo_megatron.types import Prompt


def problems(train: int, heldout: int) -> Problems:
    prompts = [Prompt(str(length), (0,) * length, Task("math")) for length in (train, heldout)]
    return Problems(train=(prompts[0],), heldout=(prompts[1],), drawn=2, duplicates=0)


@pytest.mark.parametrize(("train", "heldout"), [(7, 2), (2, 7)])
def test_the_longest_prompt_and_a_full_response_just_fit(train: int, heldout: int) -> None:
    check_room(problems(train, heldout), 3, {"rollout.cache_tokens": 10})
    with pytest.raises(DataError, match=r"has 7 tokens.* 11 in all, more than rollout.cache_tokens = 10$"):
        check_room(problems(train, heldout), 4, {"rollout.cache_tokens": 10, "batch.micro_batch_tokens": 11})


def test_every_overflow_is_named() -> None:
    with pytest.raises(DataError, match="more than a = 5 and b = 6$"):
        check_room(problems(4, 4), 3, {"a": 5, "b": 6, "c": 7})
