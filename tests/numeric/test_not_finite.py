"""A gradient that is not finite: the step is left out, counted, and the first layer at fault is named."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from gppo_megatron.config.schema import Optimizer
from gppo_megatron.errors import GppoError
from gppo_megatron.objective.policy_gradient import Objective, PolicyGradient, TokenLoss, TokenStreams
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.not_finite import places
from gppo_megatron.policy.megatron.update import MegatronModel, MegatronPolicy
from tests.distributed.reference import batch_of, random_model
from tests.single_process import model_of, world_of_one

GPPO = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
OPTIMIZER = Optimizer(lr=1e-2, schedule="linear", weight_decay=0.1, max_skipped=2)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    random_model("qwen3", False).save_pretrained(path)
    return path


@dataclass(frozen=True)
class Scaled:
    """Another objective, its loss times `factor`."""

    objective: Objective
    factor: float

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        return replace(token_loss := self.objective(streams), loss_T=token_loss.loss_T * self.factor)


def weights_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def policy_of(folder: Path, optimizer: Optimizer = OPTIMIZER) -> tuple[MegatronModel, MegatronPolicy]:
    model = model_of(folder)
    return model, MegatronPolicy(model, optimizer, 10)


@contextmanager
def broken(model: MegatronModel, place: str, value: float) -> Iterator[None]:
    """The last hidden state of what `place` names is `value`, in every sequence."""
    modules: dict[str, torch.nn.Module] = {found.name: module for found, module in places(model.chunks)}

    def spoil(module: torch.nn.Module, arguments: object, output: object) -> object:
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        spoiled = hidden * torch.ones_like(hidden).index_fill(0, torch.tensor([len(hidden) - 2]), value)
        return (spoiled, *rest) if isinstance(output, tuple) else spoiled

    hook = modules[place].register_forward_hook(spoil, prepend=True)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["the embedding", "layer 1", "layer 2", "the final norm"])
def test_the_first_layer_at_fault_is_named(
    folder: Path, place: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    model, policy = policy_of(folder)
    policy.update(batch_of(micro_batch_tokens=60), GPPO)
    with broken(model, place, value):
        assert policy.update(batch_of(micro_batch_tokens=60), GPPO).flat() == {"optimizer/skipped": 1}
    assert capsys.readouterr().err == (
        f"optimizer step 2: the gradient norm is nan; {place} gives the first NaN or infinity; this batch is skipped\n"
    )


def test_every_part_of_the_model_is_looked_at(folder: Path) -> None:
    model, _ = policy_of(folder)
    assert [place.name for place, _ in places(model.chunks)] == [
        "the embedding", "layer 1", "layer 2", "the final norm",
    ]  # fmt: skip


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_fault_of_the_loss_alone(folder: Path, factor: float, capsys: pytest.CaptureFixture[str]) -> None:
    _, policy = policy_of(folder)
    policy.update(batch_of(), Scaled(GPPO, factor))
    message = capsys.readouterr().err
    assert message.startswith("optimizer step 1: the gradient norm is ")
    assert "; every layer's output is finite; " in message


def trained(folder: Path, spoil: Callable[[int], bool]) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Three good updates, with a bad one before each step that `spoil` names."""
    _, policy = policy_of(folder)
    metrics = []
    for step in range(3):
        if spoil(step):
            before, version = weights_of(policy), policy.version
            metrics.append(policy.update(batch_of(), Scaled(GPPO, math.nan)).flat())
            assert policy.version == version
            assert all(torch.equal(tensor, before[name]) for name, tensor in policy.weights())
        metrics.append(policy.update(batch_of(), GPPO).flat())
    assert policy.version == 3
    return weights_of(policy), metrics


def test_a_skipped_step_leaves_no_trace_but_its_count(folder: Path) -> None:
    """Weights, moments, learning rates and ages are those of a run that never met the bad batches."""
    plain, expected = trained(folder, lambda step: False)
    weights, metrics = trained(folder, lambda step: step != 1)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in weights.items())
    assert [each.get("optimizer/skipped") for each in metrics] == [1, 0, 0, 1, 0]
    kept = [each for each in metrics if each != {"optimizer/skipped": 1}]
    assert list(map(str, kept)) == list(map(str, expected))  # as text, NaN equals NaN
    rates = [each["optimizer/lr"] for each in expected]
    assert rates[0] > rates[1] > rates[2]


def test_the_gradients_are_cleared(folder: Path) -> None:
    model, policy = policy_of(folder)
    policy.update(batch_of(), Scaled(GPPO, math.nan))
    for name, gradient in model.export(lambda parameter: parameter.main_grad):
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


def test_too_many_in_a_row_end_the_run(folder: Path) -> None:
    _, policy = policy_of(folder)
    bad = Scaled(GPPO, math.nan)
    for objective in (bad, bad, GPPO, bad, bad):
        policy.update(batch_of(), objective)
    with pytest.raises(
        GppoError,
        match=r"optimizer step 2: .* tried 3 times in a row, more often than optimizer\.max_skipped = 2 allows; lower",
    ):
        policy.update(batch_of(), bad)
    assert policy.version == 1


def test_none_may_be_skipped(folder: Path) -> None:
    _, policy = policy_of(folder, replace(OPTIMIZER, max_skipped=0))
    with pytest.raises(GppoError, match=r"tried 1 times in a row, more often than optimizer\.max_skipped = 0 allows"):
        policy.update(batch_of(), Scaled(GPPO, math.nan))
