"""A checkpoint of one layout read by another goes on as if nothing had changed but rounding; read by its own, as if
nothing had changed.

One group of processes runs many jobs: starting one takes longer than most of them.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from gppo_megatron.config.schema import Memory, Parallel
from tests.distributed.processes import run_group
from tests.distributed.reference import assert_close, random_model
from tests.distributed.reshard import Job

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("reshard.py")
OVERLAP = {"overlap_gradients": True, "overlap_parameters": True}


@dataclass(frozen=True)
class Layout:
    parallel: Parallel = Parallel()  # noqa: RUF009 - frozen
    shared: bool = False
    """Whether the replicas share the optimizer's state."""

    def __str__(self) -> str:
        plain, sizes = Parallel(), self.parallel
        changed = [field.name for field in fields(sizes) if getattr(sizes, field.name) != getattr(plain, field.name)]
        names = [name if getattr(sizes, name) is True else f"{name}{getattr(sizes, name)}" for name in changed]
        return "-".join([*names, *["shared"] * self.shared]) or "whole"


WHOLE, TENSOR, PIPELINE, DATA = (
    Layout(Parallel(**sizes)) for sizes in ({}, {"tensor": 2}, {"pipeline": 2}, {"data": 2})
)
CONTEXT, INTERLEAVED = Layout(Parallel(context=2)), Layout(Parallel(pipeline=2, virtual_stages=2))
SHARED, OVERLAPPED = Layout(Parallel(data=2), True), Layout(Parallel(data=2, **OVERLAP), True)
EXPERTS, SHARED_EXPERTS = (Layout(Parallel(data=2, expert=2), shared) for shared in (False, True))
CUT_EXPERTS = Layout(Parallel(tensor=2, sequence=True, expert_tensor=2))
BOTH = Layout(Parallel(tensor=2, sequence=True, data=2, expert=2, expert_tensor=2))

Row = tuple[str, Layout, Layout]
"""A model, the layout that writes and the one that reads."""

DENSE = [
    *((WHOLE, reader) for reader in (WHOLE, TENSOR, PIPELINE, DATA, SHARED)),
    *((TENSOR, reader) for reader in (WHOLE, TENSOR, PIPELINE, SHARED)),
    *((SHARED, reader) for reader in (WHOLE, Layout(shared=True), Layout(Parallel(tensor=2), True), SHARED)),
    *((OVERLAPPED, reader) for reader in (OVERLAPPED, WHOLE)),
    *((layout, reader) for layout in (CONTEXT, INTERLEAVED) for reader in (layout, WHOLE)),
]
SPARSE = [
    *((EXPERTS, reader) for reader in (WHOLE, EXPERTS, SHARED_EXPERTS, DATA, PIPELINE)),
    *((WHOLE, reader) for reader in (WHOLE, EXPERTS, SHARED_EXPERTS, CUT_EXPERTS, BOTH)),
    *((SHARED_EXPERTS, reader) for reader in (WHOLE, SHARED_EXPERTS)),
    *((layout, reader) for layout in (CUT_EXPERTS, BOTH) for reader in (layout, WHOLE)),
]
ROWS: list[Row] = [("dense", *row) for row in DENSE] + [("sparse", *row) for row in SPARSE]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Layout, Layout | None], dict[str, Any]]:
    """How a model went on in the layout that wrote a checkpoint, or from there in another one."""
    root = tmp_path_factory.mktemp("reshard")
    for model, family in (("dense", "qwen3"), ("sparse", "qwen3_moe")):  # with an odd vocabulary
        random_model(family, tied=model == "dense", layers=4).save_pretrained(root / model)

    def at(*names: object) -> Path:
        return root / "-".join(map(str, ("of", *names)))

    def run(jobs: list[Job]) -> None:
        for processes in sorted({job.parallel.processes for job in jobs}):
            plan = root / f"plan-{processes}"
            plan.write_bytes(pickle.dumps([job for job in jobs if job.parallel.processes == processes]))
            run_group(SCRIPT, [str(plan)], processes, timeout_seconds=200)

    def job(model: str, writer: Layout, reader: Layout | None) -> Job:
        shards, layout = at(model, writer, "shards"), reader or writer
        memory, output = Memory(distributed_optimizer=layout.shared), at(model, writer, reader)
        if reader is None:
            shards.mkdir()
            return Job(root / model, layout.parallel, memory, None, shards, output)
        return Job(root / model, layout.parallel, memory, shards, None, output)

    run([job(model, writer, None) for model, writer in dict.fromkeys(row[:2] for row in ROWS)])
    run([job(*row) for row in ROWS])
    return lambda model, writer, reader: torch.load(at(model, writer, reader))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "writer", "reader"), ROWS, ids=str)
def test_any_layout_goes_on_from_any_other(
    model: str, writer: Layout, reader: Layout, outcomes: Callable[[str, Layout, Layout | None], dict[str, Any]]
) -> None:
    found, expected = outcomes(model, writer, reader), outcomes(model, writer, None)
    assert found["version"] == expected["version"] == 4
    rates = [[step["optimizer/lr"] for step in outcome["metrics"]] for outcome in (found, expected)]
    norms = [[step["optimizer/grad_norm"] for step in outcome["metrics"]] for outcome in (found, expected)]
    assert rates[0] == rates[1]
    if writer == reader:
        assert norms[0] == norms[1]
        assert set(found["weights"]) == set(expected["weights"])
        assert all(torch.equal(tensor, expected["weights"][name]) for name, tensor in found["weights"].items())
    else:
        assert norms[0] == pytest.approx(norms[1], rel=2e-5)
        assert_close(found["weights"], expected["weights"], 2e-5)
