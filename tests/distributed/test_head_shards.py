"""The vocabulary cut over two ranks, in float64."""

from pathlib import Path

import pytest

from tests.distributed.processes import run_group

pytestmark = pytest.mark.distributed


def test_statistics_and_gradients_from_shards_equal_the_whole() -> None:
    run_group(Path(__file__).with_name("head_shards.py"), [], 2)
