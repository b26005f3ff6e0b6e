"""A checkpoint of one layout read by another goes on as if nothing had changed but rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import run_group
from tests.distributed.reference import assert_close, random_model

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("reshard.py")
Layout = tuple[int, int, int, int]
"""tensor, pipeline, data; and 1 where the replicas share the optimizer's state."""


def outcome(model: Path, layout: Layout, read: Path | None, write: Path | None, at: Path) -> dict[str, Any]:
    tensor, pipeline, data, _ = layout
    sizes = [str(size) for size in layout]
    folders = [str(path) if path else "-" for path in (read, write)]
    run_group(SCRIPT, [str(model), *sizes, *folders, str(at)], tensor * pipeline * data, timeout_seconds=280)
    return torch.load(at)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, and with an odd vocabulary, which tensor parallelism pads."""
    folder = tmp_path_factory.mktemp("model")
    random_model("qwen3", tied=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[(1, 1, 1, 0), (2, 1, 1, 0)], ids=str)
def written(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint after two steps, and how the process that wrote it went on."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "shards").mkdir()
    return folder / "shards", outcome(model, request.param, None, folder / "shards", folder / "out")


@pytest.mark.parametrize("layout", [(1, 1, 1, 0), (2, 1, 1, 0), (1, 2, 1, 0), (1, 1, 2, 0)], ids=str)
def test_any_layout_reads_any_other(written: Any, model: Path, layout: Layout, tmp_path: Path) -> None:
    shards, expected = written
    assert_goes_on(outcome(model, layout, shards, None, tmp_path / "out"), expected)


@pytest.mark.parametrize("layout", [(1, 1, 1, 1), (2, 1, 1, 1)], ids=str)
def test_a_distributed_optimizer_reads_that_of_any_layout(model: Path, layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    expected = outcome(model, (1, 1, 2, 1), None, tmp_path / "shards", tmp_path / "expected")
    assert_goes_on(outcome(model, layout, tmp_path / "shards", None, tmp_path / "out"), expected)


def assert_goes_on(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["version"] == expected["version"] == 4
    assert_close(found["weights"], expected["weights"], 2e-5)
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours["optimizer/lr"] == theirs["optimizer/lr"]
        assert ours["optimizer/grad_norm"] == pytest.approx(theirs["optimizer/grad_norm"], rel=2e-5)
