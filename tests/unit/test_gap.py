"""The gap between sampler and trainer: its tail, its bands, and when the alarm speaks."""

import math

import pytest
import torch

from gppo_megatron.config.bounds import BOUNDS
from gppo_megatron.config.keeping import GapAlarm as Limits
from gppo_megatron.errors import SyncError
from gppo_megatron.metrics import Max, Mean, StepMetrics
from gppo_megatron.objective.policy_gradient import MaximumLikelihood, TokenStreams
from gppo_megatron.objective.sampler_gap import GapMeasured
from gppo_megatron.observe.gap_alarm import GapAlarm
from gppo_megatron.types import Alone, Team
from tests.unit.test_collect import in_threads, teams_of

SAMPLED = torch.tensor([0.005, 0.05, 0.05, 0.3, 0.7, 0.95, 0.95, 0.2]).log()
GAPS = torch.tensor([0.2, 0.05, -0.15, 0.002, 0.0005, 0.0, 9.0, float("nan")])


def streams() -> TokenStreams:
    """The last but one token was sampled by older weights; the last has no log-prob."""
    zeros_T = torch.zeros(8)
    return TokenStreams(
        logprobs_T=(SAMPLED + GAPS).requires_grad_(),
        entropy_T=zeros_T,
        anchor_logprobs_T=SAMPLED,
        sampler_logprobs_T=SAMPLED,
        advantages_T=zeros_T,
        age_T=torch.tensor([0, 0, 0, 0, 0, 0, 2, 0]),
        mask_T=torch.ones(8, dtype=torch.bool),
    )


def test_tail_and_bands_are_of_tokens_that_the_current_weights_sampled() -> None:
    plain = MaximumLikelihood()(streams())
    loss = GapMeasured(MaximumLikelihood())(streams())
    assert torch.equal(loss.loss_T, plain.loss_T)
    assert set(plain.metrics) < set(loss.metrics)
    values = {name: float(metric.value) for name, metric in loss.metrics.items() if name.startswith("gap/")}
    assert values == pytest.approx(
        {
            "gap/above_0.001": 4 / 6,
            "gap/above_0.01": 3 / 6,
            "gap/above_0.1": 2 / 6,
            "gap/mu_0_to_0.01": 0.2,
            "gap/mu_0.01_to_0.1": 0.1,
            "gap/mu_0.1_to_0.5": 0.002,
            "gap/mu_0.5_to_0.9": 0.0005,
            "gap/mu_0.9_to_1": 0.0,
        },
        abs=1e-6,
    )


def gap(mean: float, largest: float = 0.0) -> StepMetrics:
    weight = 0.0 if math.isnan(mean) else 2.0
    values = {"policy/sampler_gap": Mean(0.0 if math.isnan(mean) else 2 * mean, weight)}
    return StepMetrics({**values, "policy/sampler_gap_max": Max(-math.inf if math.isnan(mean) else largest)})


ALONE = Alone()


def alarm(action: str, world: Team = ALONE, **limits: float) -> GapAlarm:
    return GapAlarm(world, {f"policy/{name}": limit for name, limit in limits.items()}, 2, action)  # type: ignore[arg-type]


def test_it_stops_the_run_after_so_many_steps_in_a_row_above_the_limit() -> None:
    watch = alarm("stop", sampler_gap=0.1)
    for step, mean in enumerate([0.2, 0.05, 0.2, math.nan]):
        watch(step, gap(mean))
    with pytest.raises(SyncError, match=r"step 4: policy/sampler_gap is 0.3 nats, above its limit of 0.1, for 2 steps"):
        watch(4, gap(0.3))


def test_it_warns_once_until_the_gap_was_small_again(capsys: pytest.CaptureFixture[str]) -> None:
    watch = alarm("warn", sampler_gap=0.1, sampler_gap_max=1.0)
    for step, (mean, largest) in enumerate([(0.05, 2.0), (0.05, 3.0), (0.05, 3.0), (0.05, 0.5), (0.2, 0), (0.2, 0)]):
        watch(step, gap(mean, largest))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == [
        "step 1: policy/sampler_gap_max is 3 nats",
        "step 5: policy/sampler_gap is 0.2 nats",
    ]


def test_all_processes_stop_together_on_the_mean_over_all(capsys: pytest.CaptureFixture[str]) -> None:
    alarms = [alarm("stop", team, sampler_gap=0.1) for team in teams_of(2)]
    for parts, stops in (((0.3, 0.0), False), ((0.0, 0.3), True)):

        def stopped(watch: GapAlarm, mean: float) -> bool:
            try:
                watch(1, gap(mean))
            except SyncError:
                return True
            return False

        calls = [lambda w=w, m=m: stopped(w, m) for w, m in zip(alarms, parts, strict=True)]
        assert in_threads(calls) == [stops, stops]
    assert capsys.readouterr().err == ""


def test_by_default_it_warns() -> None:
    assert Limits() == Limits(mean=None, largest=None, steps=3, action="warn")
    assert BOUNDS[Limits]["mean"](0.0) is not None
