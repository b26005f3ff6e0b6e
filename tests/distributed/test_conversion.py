"""Converted checkpoints and several processes: those that load them, those that save, and those that convert.

One group of processes runs many cases: starting one takes longer than most of them.
"""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints_tools.convert import Options, hf_to_megatron, megatron_to_hf
from gppo_megatron.checkpoint.manifest import verify
from gppo_megatron.checkpoint.metadata import read_contents
from gppo_megatron.config.schema import Parallel
from tests.distributed.conversion import Case
from tests.distributed.processes import run_group
from tests.unit.conversion import FAMILIES, assert_same, hf_folder, to_megatron

SCRIPT = Path(__file__).with_name("conversion.py")
pytestmark = pytest.mark.distributed
LAYERS, KV_HEADS = 4, 2

MODELS = [(family, tied) for family in sorted(FAMILIES) for tied in (False, True)]
DENSE = {2: [Parallel(tensor=2), Parallel(pipeline=2)], 4: [Parallel(tensor=4), Parallel(tensor=2, pipeline=2)]}
SPARSE = {
    2: [Parallel(data=2, expert=2), Parallel(tensor=2, expert=2), Parallel(tensor=2, expert_tensor=2)],
    4: [
        Parallel(tensor=4, expert=2, expert_tensor=2), Parallel(tensor=2, pipeline=2, expert=2),
        Parallel(pipeline=2, data=2, expert=2),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Each converted, with what transformers computes; 2 key-value heads are fewer than 4 processes."""
    roots = {}
    generator = torch.Generator().manual_seed(5)
    for family, tied in MODELS:
        root = tmp_path_factory.mktemp(f"{family}-{'tied' if tied else 'untied'}")
        hf = hf_folder(root / "hf", family, tied, layers=LAYERS, kv_heads=KV_HEADS)
        to_megatron(hf, root / "converted")
        tokens_BS = torch.randint(37, (1, 23), generator=generator)
        model = transformers.AutoModelForCausalLM.from_pretrained(hf, attn_implementation="sdpa").eval()
        with torch.no_grad():
            torch.save({"tokens": tokens_BS, "logits": model(tokens_BS).logits}, root / "expected")
        roots[family, tied] = root
    return roots


def cases_of(root: Path, family: str, processes: int) -> list[Case]:
    layouts = (SPARSE if family == "qwen3_moe" else DENSE)[processes]
    if family not in ("qwen3", "qwen3_moe"):
        layouts = layouts[:1]  # they differ from Qwen3 in names and biases alone
    return [Case(root, parallel, root / f"saved-{processes}-{place}") for place, parallel in enumerate(layouts)]


@pytest.mark.parametrize("processes", [2, 4])
def test_megatron_loads_them_at_any_layout_computes_the_same_and_what_it_saves_comes_back_exactly(
    processes: int, models: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    cases = [case for (family, _), root in models.items() for case in cases_of(root, family, processes)]
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    run_group(SCRIPT, [str(tmp_path / "cases")], processes, timeout_seconds=400)
    for case in cases:
        embedding = read_contents(case.saved).tensors["embedding.word_embeddings.weight"]
        assert len(embedding.chunks) == case.parallel.tensor
        assert embedding.shape[0] == 37 + -37 % case.parallel.tensor
        back = case.saved.with_name(f"{case.saved.name}-back")
        megatron_to_hf(case.saved, back, Options(config=case.root / "hf"), lambda _: None)
        assert_same(case.root / "hf", back)


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_convert_to_the_same_bytes(processes: int, tmp_path: Path) -> None:
    hf = hf_folder(tmp_path / "hf", "qwen3_moe", dtype=torch.bfloat16)
    options = Options(file_bytes=8192)
    for count in (1, processes):
        several = replace(options, processes=count)
        hf_to_megatron(hf, tmp_path / f"megatron-{count}", several, lambda _: None)
        megatron_to_hf(tmp_path / f"megatron-{count}", tmp_path / f"back-{count}", several, lambda _: None)
        assert_same(hf, tmp_path / f"back-{count}")
    for kind in ("megatron", "back"):
        one, many = tmp_path / f"{kind}-1", tmp_path / f"{kind}-{processes}"
        weights = sorted(path.name for path in one.iterdir() if path.suffix in (".distcp", ".safetensors"))
        assert len(weights) > 4
        for name in weights:
            assert (one / name).read_bytes() == (many / name).read_bytes(), name


def test_killed_with_its_writers_it_leaves_no_process_and_no_folder_and_goes_on(tmp_path: Path) -> None:
    hf = hf_folder(tmp_path / "hf", "qwen3_moe", layers=LAYERS)
    killer = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.distributed.conversion_killer", str(hf), str(tmp_path)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    said = killer.stdout.splitlines()
    counts = [int(line) for line in said[:6]]
    assert counts == sorted(counts)
    assert said[7].startswith(f"going on: {counts[-1]} of ")
    verify(tmp_path / "target")
    megatron_to_hf(tmp_path / "target", tmp_path / "back", Options(), lambda _: None)
    assert_same(hf, tmp_path / "back")
