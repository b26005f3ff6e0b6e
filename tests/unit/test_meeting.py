"""Processes that find one another, although earlier ones left their traces."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from gppo_megatron.policy.megatron.meeting import fresh_store

SHORT, LONG = timedelta(seconds=0.3), timedelta(seconds=20)


def met(store: dist.Store, size: int) -> list[dist.Store]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: fresh_store(store, rank, size, LONG), reversed(range(size))))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_start_has_a_place_of_its_own(size: int) -> None:
    store = dist.HashStore()
    for start in range(3):
        places = met(store, size)
        assert not any(place.check(["address"]) for place in places)
        places[0].set("address", str(start))
        assert {place.get("address") for place in places} == {str(start).encode()}


def test_a_start_that_failed_halfway_disturbs_no_later_one() -> None:
    store = dist.HashStore()
    for rank in (0, 2, 1):  # each alone, as long as it can wait
        with pytest.raises(RuntimeError, match="Timed out waiting"):
            fresh_store(store, rank, 3, SHORT)
    first, *others = met(store, 3)
    first.set("address", "new")
    assert [other.get("address") for other in others] == [b"new"] * 2
