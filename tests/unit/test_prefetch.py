"""No prompt is lost or used twice, whatever finishes when; and what is sampled inline does not depend on the layout."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from gppo_verifiers.types import Status, Task, Verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from gppo_megatron.data.prompts import PromptStream, StreamState
from gppo_megatron.errors import CheckpointError, GppoError
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.rollout.engine import Completion, Request
from gppo_megatron.rollout.filters import GroupFilter, NoSignal, Sieve
from gppo_megatron.rollout.prefetch import Pace, Prefetching
from gppo_megatron.rollout.stored import group_from_json, group_to_json
from gppo_megatron.rollout.tickets import Finished, Ledger, Ticket
from gppo_megatron.rollout.workers import Background, Inline, Workers
from gppo_megatron.types import Alone, Group, Prompt, Team, TopTokens, Trajectory
from tests.unit.test_collect import (
    FakeEngine,
    ParityJudge,
    collector_of,
    facts,
    in_threads,
    prompt,
    synchronous,
    teams_of,
)


@dataclass(frozen=True)
class Teams:
    world: Team = Alone()
    data: Team = Alone()
    replica: Team = Alone()


def layout(data: int, replica: int) -> list[Teams]:
    world = teams_of(data * replica)
    replicas = [teams_of(replica) for _ in range(data)]
    datas = [teams_of(data) for _ in range(replica)]
    return [Teams(world[d * replica + r], datas[r][d], replicas[d][r]) for d in range(data) for r in range(replica)]


PROMPTS = [prompt(number) for number in range(40)]


def inline(teams: Teams, pace: Pace, filters: Sequence[GroupFilter] = ()) -> Prefetching:
    engine = FakeEngine()
    workers = Inline(collector_of(ParityJudge([]), engine=engine))
    return Prefetching(PromptStream(PROMPTS, 3), workers, Sieve(filters=filters), pace, teams, lambda: engine.version)


def measured(metrics: StepMetrics) -> dict[str, float]:
    return {name.removeprefix("prompts/"): value for name, value in metrics.flat().items() if name[:8] == "prompts/"}


def test_without_filters_the_groups_are_those_of_plain_sampling() -> None:
    plain = synchronous(Alone(), Alone(), 5)
    object.__setattr__(plain, "stream", PromptStream(PROMPTS, 3))
    source = inline(Teams(), Pace(prompts=5))
    for step in (1, 2, 3):
        metrics, expected = StepMetrics(), StepMetrics()
        groups = source.next_groups(step, metrics)
        assert [facts(group) for group in groups] == [facts(group) for group in plain.next_groups(step, expected)]
        assert expected.flat().items() <= metrics.flat().items()
        counts = {"dispatched": 5, "trained": 5, "empty_places": 0, "in_flight": 0, "ready": 0}
        assert counts.items() <= measured(metrics).items()


def test_filtered_groups_are_replaced_by_the_next_prompts_up_to_the_bound() -> None:
    """By hand: of the stream's prompts in order, the first four with signal."""
    everything = inline(Teams(), Pace(prompts=16)).next_groups(1, StepMetrics())
    signal = [not NoSignal().drops(group) for group in everything]
    assert signal[:7] != [True] * 7, "the test needs a group without signal"
    metrics = StepMetrics()
    groups = inline(Teams(), Pace(prompts=4, extra=12), [NoSignal()]).next_groups(1, metrics)
    expected = [group for group, good in zip(everything, signal, strict=True) if good][:4]
    assert [facts(group) for group in groups] == [facts(group) for group in expected]
    sampled = 1 + [place for place, good in enumerate(signal) if good][3]
    assert measured(metrics)["dispatched"] == sampled
    assert measured(metrics)["filtered_no_signal"] == sampled - 4

    bounded = StepMetrics()
    groups = inline(Teams(), Pace(prompts=16, extra=0), [NoSignal()]).next_groups(1, bounded)
    assert [group.prompt for group in groups] == [group.prompt for group in everything]
    assert [any(t.trainable.any() for t in group.trajectories) for group in groups] == signal
    assert measured(bounded)["empty_places"] == 16 - sum(signal)
    assert measured(bounded)["trained"] == sum(signal)


@pytest.mark.parametrize(("data", "replica"), [(2, 1), (1, 3), (2, 2), (4, 1)])
@pytest.mark.parametrize("extra", [0, 3, 50])
def test_sifted_groups_do_not_depend_on_the_layout(data: int, replica: int, extra: int) -> None:
    pace = Pace(prompts=8, extra=extra)
    alone, expected_metrics = inline(Teams(), pace, [NoSignal()]), StepMetrics()
    expected = [[facts(group) for group in alone.next_groups(step, expected_metrics)] for step in (1, 2)]
    teams = layout(data, replica)
    sources = [inline(team, pace, [NoSignal()]) for team in teams]
    merged = StepMetrics()
    for step in (1, 2):
        each = [StepMetrics() for _ in sources]
        groups = in_threads(
            [lambda s=s, m=m, step=step: s.next_groups(step, m) for s, m in zip(sources, each, strict=True)]
        )
        for team, mine in zip(teams, groups, strict=True):
            assert [facts(group) for group in mine] == expected[step - 1][team.data.rank :: data]
        for metrics in each:
            merged.merge(metrics)
    assert merged.flat() == pytest.approx(expected_metrics.flat(), rel=1e-12)


def test_an_inline_run_goes_on_as_if_it_had_never_stopped() -> None:
    pace, filters = Pace(prompts=4, extra=3), [NoSignal()]
    whole = inline(Teams(), pace, filters)
    first = [whole.next_groups(step, StepMetrics()) for step in (1, 2)]
    state = json.loads(json.dumps(whole.state()))
    later = inline(Teams(), pace, filters)
    later.restore(state)
    one, other = StepMetrics(), StepMetrics()
    assert [facts(g) for g in later.next_groups(3, one)] == [facts(g) for g in whole.next_groups(3, other)]
    assert one.flat() == other.flat()
    assert len(first) == 2


@dataclass
class Scripted:
    """`Workers` whose tickets finish when the script says so. plan: for each wait, how many finish, from which end."""

    plan: list[tuple[int, bool]]
    version: Callable[[], int]
    begun: dict[int, Ticket] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)

    def begin(self, tickets: Sequence[Ticket]) -> None:
        assert not {ticket.number for ticket in tickets} & set(self.begun)
        self.begun |= {ticket.number: ticket for ticket in tickets}

    def take(self) -> list[tuple[int, Group]]:
        done, self.done = self.done, []
        return [(number, self._group(self.begun.pop(number))) for number in done]

    def wait(self) -> None:
        count, oldest_first = self.plan.pop(0) if self.plan else (1, True)
        waiting = sorted(set(self.begun) - set(self.done), reverse=not oldest_first)
        self.done += waiting[: max(count, 0 if self.plan else 1)]

    def abandon(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.abandoned.append(number)
            del self.begun[number]
            if number in self.done:
                self.done.remove(number)

    @property
    def flying(self) -> frozenset[int]:
        return frozenset(self.begun)

    def close(self) -> None:
        pass

    def _group(self, ticket: Ticket) -> Group:
        """Two answers; every third prompt has no signal. Its oldest token is of the version of its dispatch."""
        scores = (1.0, 1.0) if ticket.number % 3 == 2 else (1.0, 0.0)
        versions = np.array([-1, ticket.version, self.version()])
        return Group(
            ticket.prompt,
            tuple(
                Trajectory(
                    np.array([2, ticket.number, 1]), np.array([0, -0.1, -0.3], np.float32), versions >= 0,
                    versions, "stop", Verdict(score, Status.GRADED),
                )
                for score in scores
            ),
        )  # fmt: skip


@dataclass
class Counted:
    """Prompts named by their place in the stream."""

    taken: int = 0

    def take(self, count: int) -> list[Prompt]:
        self.taken += count
        return [Prompt(f"p{place}", (2,), Task("none")) for place in range(self.taken - count, self.taken)]

    def state(self) -> StreamState:
        return StreamState(0, self.taken)

    def restore(self, state: StreamState) -> None:
        self.taken = state.offset


plans = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60)


@given(
    plan=plans,
    prompts=st.integers(1, 5),
    lag=st.integers(0, 3),
    updates=st.integers(1, 3),
    over=st.integers(0, 3),
    extra=st.integers(0, 4),
    stop=st.integers(1, 6),
    skips=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_prompt_is_trained_on_filtered_dropped_or_held(
    plan: list[tuple[int, bool]],
    prompts: int,
    lag: int,
    updates: int,
    over: int,
    extra: int,
    stop: int,
    skips: bool,
) -> None:
    """The same, counted from outside: by what the workers were asked for and what training got."""
    version = [7]
    pace = Pace(prompts, lag, updates, over, extra, last_step=6)
    workers = Scripted(list(plan), lambda: version[0])
    sieve = Sieve(filters=[NoSignal()])
    source = Prefetching(Counted(), workers, sieve, pace, Teams(), lambda: version[0])
    trained: list[str] = []
    totals: Counter[str] = Counter()
    for step in range(1, 7):
        metrics = StepMetrics()
        groups = source.next_groups(step, metrics)
        counts = measured(metrics)
        assert len(groups) == prompts
        used = [group for group in groups if group.trajectories[0].trainable.any()]
        assert len(used) == counts["trained"] == prompts - counts["empty_places"]
        for group in used:
            oldest = min(int(each.policy_versions[1]) for each in group.trajectories)
            assert version[0] - oldest <= lag * updates, "older than the bound"
        assert counts["dispatched"] <= prompts * (1 + lag) + over + extra
        trained += [group.prompt.id for group in used]
        totals.update({name: int(value) for name, value in counts.items() if "staleness" not in name})
        ended = sum(totals[name] for name in ("trained", "filtered_no_signal", "dropped_stale", "dropped_straggler"))
        assert totals["dispatched"] == ended + counts["in_flight"] + counts["ready"]
        assert counts["in_flight"] == len(workers.begun)
        if over == 0:
            assert counts["dropped_straggler"] == 0, "without over-sampling, stragglers are waited for"
        version[0] += 0 if skips else updates
        if step == stop:
            state = json.loads(json.dumps(source.state()))
            workers = Scripted(list(plan), lambda: version[0])
            source = Prefetching(Counted(), workers, sieve, pace, Teams(), lambda: version[0])
            source.restore(state)
            assert json.loads(json.dumps(source.state())) == state
    assert len(set(trained)) == len(trained), "trained on twice"


def test_a_lost_prompt_is_noticed() -> None:
    class Losing(Scripted):
        def take(self) -> list[tuple[int, Group]]:
            taken = super().take()
            self.begun.pop(max(self.begun, default=-1), None)
            return taken

    workers = Losing([(3, True)] * 9, lambda: 0)
    source = Prefetching(Counted(), workers, Sieve(), Pace(2, max_lag=1, updates=1), Teams(), lambda: 0)
    with pytest.raises(GppoError, match="prompts are not conserved: 4 dispatched, 2 trained on, 0 filtered"):
        source.next_groups(1, StepMetrics())


def test_the_ledger_knows_when_a_group_is_held_by_nobody() -> None:
    ledger = Ledger()
    tickets = [Ticket(number, PROMPTS[number], StreamState(0, number), 1, number, 0) for number in range(3)]
    ledger.dispatch(tickets)
    ledger.finish(Finished(1, 0, None))
    ledger.check([0, 2], [1])
    for flying, ready in (([0], [1]), ([0, 2], []), ([0, 2, 3], [1]), ([0, 1], [2])):
        with pytest.raises(GppoError, match="not conserved"):
            ledger.check(flying, ready)


def test_a_step_takes_what_was_sampled_ahead_and_waits_for_what_would_be_too_old() -> None:
    version = [0]
    workers = Scripted([(2, False), (2, True), (1, True)], lambda: version[0])
    source = Prefetching(Counted(), workers, Sieve(), Pace(2, 1, 1), Teams(), lambda: version[0])
    first = source.next_groups(1, StepMetrics())
    assert [group.prompt.id for group in first] == ["p2", "p3"], "whatever is done first"
    assert sorted(workers.begun) == [0, 1]
    version[0] = 1
    second = source.next_groups(2, StepMetrics())
    assert [group.prompt.id for group in second] == ["p0", "p1"]
    metrics = StepMetrics()
    version[0] = 2
    source.next_groups(3, metrics)
    assert measured(metrics)["staleness_max"] == 1


def test_stragglers_are_given_up_where_there_are_more_prompts_than_needed() -> None:
    version = [0]
    workers = Scripted([(3, False), (0, True)], lambda: version[0])
    source = Prefetching(Counted(), workers, Sieve(), Pace(3, 0, 1, over_sampling=1), Teams(), lambda: version[0])
    metrics = StepMetrics()
    groups = source.next_groups(1, metrics)
    assert [group.prompt.id for group in groups] == ["p1", "p2", "p3"]
    assert workers.abandoned == [0]
    assert measured(metrics)["dropped_straggler"] == 1


def test_a_stored_group_is_the_same_bit_for_bit() -> None:
    rng = np.random.default_rng(5)
    rest = np.array([0, -1, -np.inf], np.float32)
    top = TopTokens(np.array([[3, -1]] * 3, np.int32), rng.normal(size=(3, 2)).astype(np.float32), rest)
    plain = Trajectory(
        np.array([2, 7, 1]), rng.normal(size=3).astype(np.float32), np.array([False, True, False]),
        np.array([-1, 5, 6]), "length", Verdict(None, Status.CRASH, "died"), penalty=0.1,
    )  # fmt: skip
    group = Group(PROMPTS[3], (plain, replace(plain, top=top, finish="stop", verdict=Verdict(0.3, Status.GRADED))))
    again = group_from_json(json.loads(json.dumps(group_to_json(group))), PROMPTS[3])
    assert facts(again) == facts(group)
    assert [each.penalty for each in again.trajectories] == [0.1, 0.1]
    one, other = again.trajectories
    assert one.top is None
    assert other.top is not None
    for name in ("ids", "logprobs", "rest"):
        held, before = getattr(other.top, name), getattr(top, name)
        assert held.dtype == before.dtype
        assert np.array_equal(held, before)


def test_other_data_on_resuming_are_noticed() -> None:
    workers = Scripted([(2, True)], lambda: 0)
    source = Prefetching(Counted(), workers, Sieve(), Pace(2, 1), Teams(), lambda: 0)
    source.next_groups(1, StepMetrics())
    state = json.loads(json.dumps(source.state()))
    other = Prefetching(PromptStream(PROMPTS, 1), workers, Sieve(), Pace(2, 1), Teams(), lambda: 0)
    with pytest.raises(CheckpointError, match="they have changed"):
        other.restore(state)
    with pytest.raises(CheckpointError, match="do not fit this run"):
        other.restore({"epoch": 0, "offset": 3})


class Detached:
    """An engine that samples when it is told to, by itself."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.futures: list[Future[list[Completion]]] = []
        self.batches: list[Sequence[Request]] = []

    def begin(self, batches: Sequence[Sequence[Request]]) -> list["Future[list[Completion]]"]:
        new: list[Future[list[Completion]]] = [Future() for _ in batches]
        self.futures += new
        self.batches += batches
        return new

    def finish(self, number: int) -> None:
        self.futures[number].set_result(self.engine.generate(self.batches[number]))


def taken(workers: Workers, count: int) -> list[tuple[int, Group]]:
    """Waits for as many; each wait is a moment at most."""
    found: list[tuple[int, Group]] = []
    for _ in range(300):
        found += workers.take()
        if len(found) >= count:
            break
        workers.wait()
    return found


def test_groups_come_as_the_engine_finishes_them_and_are_judged_in_one_other_thread() -> None:
    threads: list[threading.Thread] = []

    class Noting(ParityJudge):
        def judge(self, answers: Sequence[Any]) -> list[Verdict]:
            threads.append(threading.current_thread())
            return super().judge(answers)

        def close(self) -> None:
            threads.append(threading.current_thread())

    engine = Detached()
    judge = Noting([])
    workers = Background(engine, lambda: collector_of(judge))
    tickets = [Ticket(number, PROMPTS[number], StreamState(0, number), 1, number, 0) for number in range(4)]
    workers.begin(tickets)
    engine.finish(2)
    (number, group) = taken(workers, 1)[0]
    expected = collector_of(ParityJudge([])).collect([PROMPTS[2]], [2], 1, StepMetrics())
    assert number == 2
    assert facts(group) == facts(expected[0])
    engine.finish(1)
    workers.abandon([1, 3])
    assert workers.flying == {0}
    assert engine.futures[3].cancelled()
    engine.finish(0)
    assert [number for number, _ in taken(workers, 1)] == [0], "what is given up never comes"
    assert workers.take() == []
    workers.close()
    workers.close()
    assert set(threads) == {threads[0]}
    assert threads[0] is not threading.main_thread()


def test_what_sampling_raises_is_raised_to_the_trainer() -> None:
    engine = Detached()
    workers = Background(engine, lambda: collector_of(ParityJudge([])))
    workers.begin([Ticket(0, PROMPTS[0], StreamState(0, 0), 1, 0, 0)])
    engine.futures[0].set_exception(GppoError("no rollout server is left"))
    with pytest.raises(GppoError, match="no rollout server is left"):
        taken(workers, 1)
    workers.close()
