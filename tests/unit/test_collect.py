"""Collecting, sourcing and evaluating, with an engine and a judge that are arithmetic of their inputs."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from gppo_verifiers.types import Answer, Status, Task, Verdict
from hypothesis import given
from hypothesis import strategies as st

from gppo_megatron.errors import DataError
from gppo_megatron.evaluate.held_out import Evaluation, Sample
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.rollout.collect import Collector, request_seed
from gppo_megatron.rollout.engine import Completion, Request, Sampling
from gppo_megatron.rollout.source import GivenAnswers, Synchronous
from gppo_megatron.types import Alone, Group, Prompt, TopTokens, share_of

SAMPLING = Sampling(1.0, 9, frozenset({1}))


@dataclass
class FakeEngine:
    """Samples up to 3 tokens that are a function of the seed; every third response stops."""

    version: int = 4
    requests: list[Request] = field(default_factory=list)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        return [self._completion(request.seed) for request in requests]

    def _completion(self, seed: int) -> Completion:
        token_ids = np.array([2 + seed // 7**place % 7 for place in range(1 + seed % 3)])
        finish = "length"
        if seed % 3 == 0:
            token_ids[-1], finish = 1, "stop"
        return Completion(
            token_ids, (-0.25 * token_ids).astype(np.float32), np.full_like(token_ids, self.version), finish
        )


class ScriptedJudge:
    """Hands out the given verdicts in turn."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        self.verdicts = list(verdicts)
        self.answers: list[Answer] = []

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        self.answers += answers
        taken, self.verdicts = self.verdicts[: len(answers)], self.verdicts[len(answers) :]
        return taken

    def close(self) -> None:
        pass


class ParityJudge(ScriptedJudge):
    """A function of the answer's text alone: right, wrong, unreadable, or without a verdict."""

    KINDS = (
        Verdict(1.0, Status.GRADED),
        Verdict(0.0, Status.GRADED),
        Verdict(0.0, Status.UNPARSABLE),
        Verdict(None, Status.TIMEOUT),
    )

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        return [self.KINDS[sum(map(ord, answer.text)) % 4] for answer in answers]


@dataclass
class CountingStream:
    """Prompt 0, prompt 1, ... modulo `distinct`, as every process's own copy of the stream yields them."""

    distinct: int = 1000
    taken: int = 0
    answers: bool = True

    def take(self, count: int) -> list[Prompt]:
        places = range(self.taken, self.taken + count)
        self.taken += count
        return [prompt(place % self.distinct, self.answers) for place in places]


def prompt(number: int, answered: bool = True) -> Prompt:
    answer = (3, 1) if answered else ()
    return Prompt(f"p{number}", (2,) * (1 + number % 4), Task("fake", {"number": number}), answer)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(95 + token) for token in token_ids if token > 1)


def collector_of(judge: ScriptedJudge, group_size: int = 4, engine: FakeEngine | None = None) -> Collector:
    return Collector(engine or FakeEngine(), judge, SAMPLING, decode, group_size, seed=9)


def facts(group: Group) -> tuple[Any, ...]:
    """All that a group holds, comparable."""
    return group.prompt, [
        (t.token_ids.tolist(), t.sampler_logprobs.tolist(), t.trainable.tolist(), t.policy_versions.tolist())
        + (t.finish, t.verdict)
        for t in group.trajectories
    ]


def test_trajectories_hold_prompt_and_response() -> None:
    engine, judge = FakeEngine(), ScriptedJudge([Verdict(1.0, Status.GRADED)] * 6)
    groups = collector_of(judge, 3, engine).collect(
        [prompt(2), prompt(3)], places=[7, 8], step=5, metrics=StepMetrics()
    )
    seeds = [request_seed(9, 5, place, f"p{place - 5}", index) for place in (7, 8) for index in range(3)]
    assert [request.seed for request in engine.requests] == seeds
    assert [group.prompt.id for group in groups] == ["p2", "p3"]
    for trajectory, request in zip(groups[1].trajectories, engine.requests[3:], strict=True):
        response = engine.generate([request])[0]
        assert trajectory.token_ids.tolist() == [2, 2, 2, 2, *response.token_ids]
        assert trajectory.sampler_logprobs.tolist() == [0, 0, 0, 0, *response.logprobs]
        assert trajectory.trainable.tolist() == [False] * 4 + [True] * len(response.token_ids)
        assert trajectory.policy_versions.tolist() == [-1] * 4 + [4] * len(response.token_ids)
        assert trajectory.finish == response.finish
        arrays = (trajectory.token_ids, trajectory.sampler_logprobs, trajectory.trainable, trajectory.policy_versions)
        assert [array.dtype for array in arrays] == [np.int64, np.float32, np.bool_, np.int64]
    texts = [decode(engine.generate([request])[0].token_ids) for request in engine.requests[:6]]
    assert [answer.text for answer in judge.answers] == texts
    assert [answer.task.payload["number"] for answer in judge.answers] == [2, 2, 2, 3, 3, 3]


def test_top_tokens_stand_behind_the_prompt() -> None:
    @dataclass
    class Reporting(FakeEngine):
        def _completion(self, seed: int) -> Completion:
            plain = super()._completion(seed)
            ids = plain.token_ids[:, None].astype(np.int32)
            return replace(plain, top=TopTokens(ids, -ids.astype(np.float32), plain.logprobs))

    (group,) = collector_of(ParityJudge([]), engine=Reporting()).collect([prompt(3)], [0], 1, StepMetrics())
    for trajectory in group.trajectories:
        before = len(group.prompt.token_ids)
        assert trajectory.top is not None
        assert trajectory.top.ids[before:, 0].tolist() == trajectory.token_ids[before:].tolist()
        assert (trajectory.top.ids[:before] == -1).all()
        assert trajectory.top.rest[before:].tolist() == trajectory.sampler_logprobs[before:].tolist()


def test_experts_of_prompt_and_response_stay_with_them() -> None:
    @dataclass
    class Reporting(FakeEngine):
        def _completion(self, seed: int) -> Completion:
            plain = super()._completion(seed)
            return replace(plain, experts=np.full((4 + len(plain.token_ids), 2, 1), seed % 7, np.int16))

    (group,) = collector_of(ParityJudge([]), engine=Reporting()).collect([prompt(3)], [0], 1, StepMetrics())
    for index, trajectory in enumerate(group.trajectories):
        assert trajectory.experts is not None
        assert trajectory.experts.shape == (len(trajectory.token_ids), 2, 1)
        assert (trajectory.experts == request_seed(9, 1, 0, "p3", index) % 7).all()


def test_seeds_tell_every_response_of_a_run_apart() -> None:
    base = (1, 2, 3, "p4", 5)
    others = [(7, 2, 3, "p4", 5), (1, 7, 3, "p4", 5), (1, 2, 7, "p4", 5), (1, 2, 3, "p7", 5), (1, 2, 3, "p4", 7)]
    seeds = {request_seed(*place) for place in [base, *others]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(*base) == 1916994176997391540


def test_metrics_count_failures_apart_from_wrong_answers() -> None:
    right, wrong = Verdict(1.0, Status.GRADED), Verdict(0.0, Status.GRADED)
    unread, late, dead = Verdict(0.0, Status.UNPARSABLE), Verdict(None, Status.TIMEOUT), Verdict(None, Status.CRASH)
    script = [right, wrong, late, right, right, late, late, right, late, dead, late, late, unread, wrong, wrong, dead]
    metrics = StepMetrics()
    engine = FakeEngine()
    groups = collector_of(ScriptedJudge(script), 4, engine).collect([prompt(n) for n in range(4)], range(4), 0, metrics)
    lengths = [int(t.trainable.sum()) for group in groups for t in group.trajectories]
    assert groups[0].rewards == (1.0, 0.0, None, 1.0)
    assert metrics.flat() == {
        "rollout/reward": 4 / 8,
        "rollout/no_score": 8.0,
        "rollout/finished": sum(request.seed % 3 == 0 for request in engine.requests) / 16,
        "rollout/length": sum(lengths) / 16,
        "rollout/sampled_tokens": float(sum(lengths)),
        "rollout/groups_without_signal": 3 / 4,
        "rollout/verdict_unparsable": 1.0,
        "rollout/verdict_timeout": 6.0,
        "rollout/verdict_crash": 2.0,
        "rollout/verdict_infra": 0.0,
    }


def test_a_judge_that_loses_answers_is_noticed() -> None:
    with pytest.raises(ValueError, match="shorter"):
        collector_of(ScriptedJudge([Verdict(1.0, Status.GRADED)])).collect([prompt(0)], [0], 0, StepMetrics())


class ThreadTeam:
    """A team whose members are threads of one test; `members` of one team share `slots` and `barrier`."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(slots)
        self._slots, self._barrier = slots, barrier

    def gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._slots)
        self._barrier.wait(timeout=60)
        return values


def teams_of(size: int) -> list[ThreadTeam]:
    slots: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    return [ThreadTeam(rank, slots, barrier) for rank in range(size)]


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def synchronous(data: Any, replica: Any, prompts_per_step: int, distinct: int = 1000) -> Synchronous:
    stream = CountingStream(distinct)
    return Synchronous(stream, collector_of(ParityJudge([])), prompts_per_step, data, replica)


@pytest.mark.parametrize(("data", "replica"), [(1, 2), (2, 1), (2, 2), (3, 2), (2, 4), (1, 5)])
@pytest.mark.parametrize("prompts_per_step", [3, 8])
def test_groups_and_metrics_do_not_depend_on_the_layout(data: int, replica: int, prompts_per_step: int) -> None:
    alone, expected_metrics = synchronous(Alone(), Alone(), prompts_per_step), StepMetrics()
    expected = [facts(group) for step in (0, 1) for group in alone.next_groups(step, expected_metrics)]
    replicas = [teams_of(replica) for _ in range(data)]
    places = [(d, r) for d in range(data) for r in range(replica)]
    sources = [synchronous(Alone(d, data), replicas[d][r], prompts_per_step) for d, r in places]
    merged, found = StepMetrics(), []
    for step in (0, 1):
        measured = [StepMetrics() for _ in sources]
        groups = in_threads(
            [lambda s=s, m=m, step=step: s.next_groups(step, m) for s, m in zip(sources, measured, strict=True)]
        )
        held = {place: [facts(group) for group in mine] for place, mine in zip(places, groups, strict=True)}
        assert all(held[d, r] == held[d, 0] for d, r in places)
        dealt = [iter(held[d, 0]) for d in range(data)]
        found += [next(dealt[place % data]) for place in range(prompts_per_step)]
        for metrics in measured:
            merged.merge(metrics)
    assert found == expected
    assert merged.flat() == pytest.approx(expected_metrics.flat(), rel=1e-12)


def test_a_prompt_drawn_twice_in_a_step_is_sampled_twice() -> None:
    groups = synchronous(Alone(), Alone(), 2, distinct=1).next_groups(0, StepMetrics())
    assert groups[0].prompt == groups[1].prompt
    assert facts(groups[0]) != facts(groups[1])


@given(count=st.integers(0, 50), size=st.integers(1, 9))
def test_shares_cover_everything_once_and_evenly(count: int, size: int) -> None:
    shares = [share_of(count, Alone(rank, size)) for rank in range(size)]
    assert [place for share in shares for place in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_given_answers_are_trajectories_to_imitate() -> None:
    groups = [GivenAnswers(CountingStream(), 5, Alone(rank, 2)).next_groups(0, StepMetrics()) for rank in range(2)]
    assert [[group.prompt.id for group in share] for share in groups] == [["p0", "p2", "p4"], ["p1", "p3"]]
    (trajectory,) = groups[0][1].trajectories
    assert trajectory.token_ids.tolist() == [2, 2, 2, 3, 1]
    assert trajectory.trainable.tolist() == [False, False, False, True, True]
    assert trajectory.sampler_logprobs.tolist() == [0.0] * 5
    assert trajectory.policy_versions.tolist() == [-1] * 5
    assert (trajectory.finish, trajectory.verdict) == ("stop", Verdict(1.0, Status.GRADED))


def test_a_prompt_without_an_answer_cannot_be_imitated() -> None:
    with pytest.raises(DataError, match="p0 has no reference answer"):
        GivenAnswers(CountingStream(answers=False), 2, Alone()).next_groups(0, StepMetrics())


def test_evaluation_counts_answers_without_a_verdict_apart() -> None:
    right, wrong, late = Verdict(1.0, Status.GRADED), Verdict(0.0, Status.GRADED), Verdict(None, Status.TIMEOUT)
    engine = FakeEngine()
    collector = collector_of(ScriptedJudge([right, late, wrong, right, late, right]), 2, engine)
    result = Evaluation(collector, [prompt(n) for n in range(3)], decode, Alone(), shown=2).run()
    stops = sum(request.seed % 3 == 0 for request in engine.requests)
    assert result.metrics.flat() == {
        "evaluation/accuracy": 3 / 4,
        "evaluation/finished": stops / 6,
        "evaluation/no_score": 2.0,
    }
    texts = [decode(engine.generate([request])[0].token_ids) for request in engine.requests[0:3:2]]
    assert result.samples == (Sample("a", texts[0], 1.0), Sample("aa", texts[1], 0.0))


@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_is_the_same_on_every_process_and_every_time(size: int) -> None:
    prompts = [prompt(n) for n in range(7)]
    alone = Evaluation(collector_of(ParityJudge([])), prompts, decode, Alone())
    expected = alone.run()
    assert alone.run().metrics.flat() == expected.metrics.flat()
    spread = [Evaluation(collector_of(ParityJudge([])), prompts, decode, team) for team in teams_of(size)]
    results = in_threads([evaluation.run for evaluation in spread])
    assert all(result.samples == expected.samples for result in results)
    merged = StepMetrics()
    for result in results:
        assert result.metrics.flat() == expected.metrics.flat()
        merged.merge(result.metrics)
    assert merged.flat() == pytest.approx(expected.metrics.flat(), rel=1e-12)
