"""The vocabulary cut over 1, 2 and 4 ranks."""

from pathlib import Path

import pytest

from tests.distributed.processes import run_group

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_statistics_and_gradients_from_shards_equal_the_whole(ranks: int) -> None:
    run_group(Path(__file__).with_name("head_shards.py"), [], ranks)
