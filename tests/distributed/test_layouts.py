"""Three optimizer steps give one loss, one gradient norm and one set of weights, whatever the layout and the split.

The reference is the Hugging Face model under plain autograd and torch's AdamW, with the trust region written out.
One group of processes runs many cases: starting one takes longer than most of them.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from gppo_megatron.config.architecture import hf_config_of_tiny
from gppo_megatron.config.schema import Memory, Parallel, TinyModel
from gppo_megatron.objective.presets import Aggregation
from tests.distributed.layouts import Case, Outcome
from tests.distributed.processes import run_group
from tests.distributed.reference import Trained, hf_training, relative

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("layouts.py")
TOLERANCE = 2e-5
SHARED = Memory(distributed_optimizer=True)
WHOLE = Parallel()
INTERLEAVED = Parallel(pipeline=2, virtual_stages=2)
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "constant_length")
BOTH = ("packed", "padded")
OVERLAP = {"overlap_gradients": True, "overlap_parameters": True}


def interleaved(case: Case) -> Case:
    """Four or more micro-batches: with two, a pipeline that mixes its messages up would look right."""
    return replace(case, micro_batch_tokens=20) if case.parallel.virtual_stages > 1 else case


# A vocabulary of 21 is padded to 22 under tensor parallelism.
ALONE = [
    *(Case("tied", WHOLE, aggregation=name, arrange=arrange) for name in AGGREGATIONS for arrange in BOTH),
    *(Case("tied", WHOLE, micro_batch_tokens=tokens, arrange=arrange)
      for tokens in (20, 40, 60) for arrange in BOTH),
    Case("tied", WHOLE, SHARED, 40),
    Case("tied", WHOLE, Memory(recompute="full")),
    Case("tied", WHOLE, Memory(recompute="selective")),
    Case("untied", WHOLE),
]  # fmt: skip
PAIRS = [
    *(Case(folder, parallel, micro_batch_tokens=40)
      for folder in ("tied", "untied")
      for parallel in (
          Parallel(tensor=2), Parallel(tensor=2, sequence=True), Parallel(pipeline=2), INTERLEAVED, Parallel(context=2),
          Parallel(data=2),
      )),
    *(Case("tied", parallel, SHARED, 40) for parallel in (
        Parallel(tensor=2, sequence=True), INTERLEAVED, Parallel(context=2), Parallel(data=2),
        Parallel(data=2, overlap_gradients=True), Parallel(data=2, **OVERLAP), Parallel(context=2, **OVERLAP),
    )),
    Case("untied", Parallel(data=2, **OVERLAP), SHARED, 40),
    *(Case("tied", parallel, micro_batch_tokens=60, aggregation=name, arrange=arrange)
      for parallel in (Parallel(context=2), Parallel(data=2), Parallel(tensor=2, sequence=True))
      for name in AGGREGATIONS for arrange in BOTH),
    Case("tied", Parallel(pipeline=2), micro_batch_tokens=60, arrange="padded"),
    Case("tied", Parallel(data=2, overlap_gradients=True), micro_batch_tokens=40),
    Case("tied", replace(INTERLEAVED, overlap_gradients=True), micro_batch_tokens=20),
    Case("tied", Parallel(context=2), Memory(recompute="full"), 40),
    Case("tied", Parallel(context=2), Memory(recompute="selective", recompute_modules=("core_attn", "mlp")), 40),
    Case("tied", Parallel(tensor=2, sequence=True), Memory(recompute="full"), 40),
    Case("tied", INTERLEAVED, Memory(recompute="full"), 20),
]  # fmt: skip
FOURS = [
    *(Case("tied", parallel, micro_batch_tokens=40) for parallel in (  # 2 key-value heads over 4 processes
        Parallel(tensor=4), Parallel(tensor=4, sequence=True),
    )),
    Case("tied", Parallel(tensor=4), micro_batch_tokens=40),  # fewer key-value heads than processes
    Case("untied", Parallel(tensor=4, sequence=True), micro_batch_tokens=40),
    *(Case(folder, parallel, micro_batch_tokens=40)
      for folder in ("four", "untied four")
      for parallel in (
          Parallel(tensor=4), Parallel(tensor=4, sequence=True), Parallel(tensor=2, pipeline=2, sequence=True),
      )),
    *(Case(folder, Parallel(pipeline=2, data=2, **OVERLAP), SHARED, 40) for folder in ("four", "untied four")),
    *(Case("four", parallel, memory, 40)
      for memory in (Memory(), SHARED)
      for parallel in (
          Parallel(data=4), Parallel(pipeline=4), Parallel(tensor=2, pipeline=2), Parallel(pipeline=2, data=2),
          Parallel(tensor=2, data=2, sequence=True),
          replace(INTERLEAVED, data=2), replace(INTERLEAVED, tensor=2, sequence=True),
          Parallel(context=2, data=2), Parallel(context=2, tensor=2, sequence=True), Parallel(context=2, pipeline=2),
          replace(INTERLEAVED, context=2), Parallel(context=4),
      )),
    *(Case("four", parallel, SHARED, 40) for parallel in (
        Parallel(data=4, **OVERLAP), Parallel(tensor=2, data=2, sequence=True, **OVERLAP),
        replace(INTERLEAVED, data=2, **OVERLAP), Parallel(context=2, data=2, **OVERLAP),
    )),
    *(Case("four", parallel, micro_batch_tokens=80, aggregation=name, arrange=arrange)
      for parallel in (Parallel(context=2, tensor=2, sequence=True), Parallel(data=4))
      for name in AGGREGATIONS[1:] for arrange in BOTH),
]  # fmt: skip
PAIRS, FOURS = list(map(interleaved, PAIRS)), list(map(interleaved, FOURS))
KV_HEADS = {"tied": 2, "untied": 2, "four": 4, "untied four": 4}
SEEDS = {"tied": 3, "untied": 3, "four": 4, "untied four": 3}  # of weights that put no token on its threshold


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3s of 4 layers with weights large enough that their log-probs are far from uniform."""
    root = tmp_path_factory.mktemp("models")
    for name, kv_heads in KV_HEADS.items():
        config = hf_config_of_tiny(TinyModel(tied="untied" not in name, layers=4, kv_heads=kv_heads))
        torch.manual_seed(SEEDS[name])
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                else:
                    parameter.mul_(3)
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


@pytest.fixture(scope="module")
def reference(folders: Path) -> Callable[[str, Aggregation], Trained]:
    return cache(lambda folder, aggregation: hf_training(folders / folder, aggregation))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [*ALONE, *PAIRS, *FOURS], ids=str)
def test_every_layout_trains_the_same_model(
    case: Case, outcome: Callable[[Case], Outcome], reference: Callable[[str, Aggregation], Trained]
) -> None:
    ours, theirs = outcome(case), reference(case.folder, case.aggregation)
    assert ours.nearest > 1e-5, "a token lies on its threshold: the layouts may decide differently"
    assert ours.losses == pytest.approx(theirs.losses, rel=TOLERANCE)
    assert ours.norms == pytest.approx(theirs.norms, rel=TOLERANCE)
    assert ours.reports == case.parallel.data, "one process of each replica reports"
    if not case.memory.distributed_optimizer:
        assert worst(ours.gradients, theirs.gradients)[0] <= TOLERANCE
    assert worst(ours.weights, theirs.weights)[0] <= TOLERANCE


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert set(ours) == set(theirs)
    return max((relative(ours[name], tensor), name) for name, tensor in theirs.items())


def test_the_cases_mean_something(reference: Callable[[str, Aggregation], Trained]) -> None:
    """Clipping is at work, aggregations differ, and the weights move by far more than the tolerance."""
    one, other = reference("tied", "token_mean"), reference("tied", "sequence_mean")
    assert min(one.norms) > 0.5
    assert worst(one.weights, other.weights)[0] > 10 * TOLERANCE


def test_the_batch_is_cut_as_the_cases_say(outcome: Callable[[Case], Outcome]) -> None:
    assert [outcome(Case("tied", WHOLE, micro_batch_tokens=tokens)).micro_batches for tokens in (20, 40, 60)] == [
        7,
        3,
        2,
    ]
