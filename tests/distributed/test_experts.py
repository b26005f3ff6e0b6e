"""Models with experts: three optimizer steps give one loss, one norm and one set of weights in every layout.

The reference is transformers under plain autograd, as in `test_layouts`. Every weight comes through the export, from
processes that each hold some of the experts.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from gppo_megatron.config.schema import Memory, Parallel
from tests.distributed.layouts import STEPS, Case, Outcome, groups_of
from tests.distributed.processes import run_group
from tests.distributed.reference import from_folder, hf_training
from tests.distributed.test_layouts import SCRIPT, TOLERANCE, worst

pytestmark = pytest.mark.distributed

SHARED = Memory(distributed_optimizer=True)
MARGIN = 1e-5
CHOSEN = 3

ALONE = [
    *(Case(folder, Parallel(), micro_batch_tokens=40, replay=replay)
      for folder in ("tied", "untied") for replay in (False, True)),
    Case("untied", Parallel(), Memory(recompute="full"), 40, replay=True),
]  # fmt: skip
PAIRS = [
    *(Case("untied", parallel, micro_batch_tokens=40, replay=True)
      for parallel in (
          Parallel(data=2, expert=2), Parallel(pipeline=2), Parallel(pipeline=2, virtual_stages=2),
          Parallel(tensor=2, sequence=True, expert=2), Parallel(context=2, expert=2),
      )),
    *(Case("untied", parallel, Memory(recompute="full"), 40, replay=True)
      for parallel in (Parallel(pipeline=2), Parallel(pipeline=2, virtual_stages=2))),
    Case("untied", Parallel(context=2, expert=2), micro_batch_tokens=60, arrange="padded", replay=True),
    *(Case(folder, parallel, micro_batch_tokens=40)
      for folder in ("tied", "untied")
      for parallel in (
          Parallel(data=2), Parallel(data=2, expert=2), Parallel(pipeline=2),
          Parallel(tensor=2, sequence=True, expert_tensor=2), Parallel(tensor=2, sequence=True, expert=2),
      )),
    *(Case("tied", parallel, micro_batch_tokens=40)
      for parallel in (
          Parallel(context=2, expert=2), Parallel(pipeline=2, virtual_stages=2),
      )),
    Case("tied", Parallel(data=2, expert=2), SHARED, 40),
    Case("tied", Parallel(data=2, expert=2), Memory(recompute="full"), 40),
    Case("tied", Parallel(data=2, expert=2), micro_batch_tokens=60, arrange="padded"),
]  # fmt: skip
FOURS = [
    *(Case("untied", parallel, micro_batch_tokens=40)
      for parallel in (
          Parallel(data=4, expert=4), Parallel(data=4, expert=2), Parallel(data=4, expert=2, expert_tensor=2),
          Parallel(data=2, pipeline=2, expert=2), Parallel(data=2, pipeline=2, virtual_stages=2, expert=2),
          Parallel(tensor=2, sequence=True, data=2, expert=2), Parallel(tensor=4, sequence=True, expert=4),
          Parallel(tensor=2, sequence=True, data=2, expert=2, expert_tensor=2),
          Parallel(tensor=2, sequence=True, pipeline=2, expert=2),
      )),
    Case("untied", Parallel(data=4, expert=2), SHARED, 40),
    Case("untied", Parallel(tensor=2, sequence=True, pipeline=2, expert=2), micro_batch_tokens=40, replay=True),
]  # fmt: skip


def small(case: Case) -> Case:
    return replace(case, micro_batch_tokens=20) if case.parallel.virtual_stages > 1 else case


PAIRS, FOURS = list(map(small, PAIRS)), list(map(small, FOURS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, the second one dense, each token to 3 of 8 experts; no two widths are equal, and with 4
    tensor-parallel processes there are fewer key-value heads than processes."""
    root = tmp_path_factory.mktemp("models")
    for name in ("tied", "untied"):
        config = transformers.Qwen3MoeConfig(
            vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2, head_dim=10, tie_word_embeddings=name == "tied", num_experts=8,
            num_experts_per_tok=CHOSEN, moe_intermediate_size=28, mlp_only_layers=[1], norm_topk_prob=name == "tied",
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15, generator=generator)
        model.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def outcome(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Outcome]:
    """Of a case; runs all cases of as many processes at once."""
    output = tmp_path_factory.mktemp("outcomes")

    @cache
    def outcomes(processes: int) -> dict[str, Outcome]:
        cases = {1: ALONE, 2: PAIRS, 4: FOURS}[processes]
        plan = output / f"plan-{processes}"
        plan.write_bytes(pickle.dumps([replace(case, folder=str(folders / case.folder)) for case in cases]))
        run_group(SCRIPT, [str(plan), str(output / str(processes))], processes, timeout_seconds=600)
        return {name: Outcome(**fields) for name, fields in torch.load(output / str(processes)).items()}

    return lambda case: outcomes(case.parallel.processes)[str(case)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [*ALONE, *PAIRS, *FOURS], ids=str)
def test_every_layout_of_experts_trains_the_same_model(
    case: Case, outcome: Callable[[Case], Outcome], folders: Path
) -> None:
    ours, theirs = outcome(case), hf_training(folders / case.folder, case.aggregation, case.replay)
    assert ours.nearest > MARGIN, "a token lies on its threshold: the layouts may decide differently"
    assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(theirs.norms, rel=TOLERANCE)
    if not case.memory.distributed_optimizer:
        assert worst(ours.gradients, theirs.gradients)[0] <= TOLERANCE
    assert worst(ours.weights, theirs.weights)[0] <= TOLERANCE


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_no_token_hangs_between_two_experts(folders: Path, name: str) -> None:
    """The last chosen expert's logit is well above the next one's, before the first step."""
    model = from_folder(folders / name)
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    with torch.no_grad():
        for step in range(STEPS):
            for group in groups_of(37, step):
                for trajectory in group.trajectories:
                    model(torch.from_numpy(trajectory.token_ids)[None])
    best = torch.cat(seen).topk(CHOSEN + 1, dim=-1).values
    assert float((best[:, CHOSEN - 1] - best[:, CHOSEN]).min()) > MARGIN
