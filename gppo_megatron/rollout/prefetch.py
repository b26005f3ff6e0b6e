"""Groups for training, sampled ahead of it or while it waits, sifted, and followed from the data to their end."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gppo_megatron.metrics import Last, Max, Mean, StepMetrics
from gppo_megatron.rollout.buffer import Buffer
from gppo_megatron.rollout.collect import measure
from gppo_megatron.rollout.filters import Sieve
from gppo_megatron.rollout.source import PromptStream
from gppo_megatron.rollout.stored import group_to_json, ledger_from_json, ledger_to_json
from gppo_megatron.rollout.tickets import Finished, Ledger, Ticket, Totals
from gppo_megatron.rollout.workers import Workers
from gppo_megatron.types import Group, Topology

DROPPED = ("stale", "straggler")


@dataclass(frozen=True)
class Pace:
    """How much is sampled, and how far ahead.

    prompts: that a step trains on. max_lag: rollouts that sampling runs ahead; updates: optimizer steps of a rollout.
    over_sampling: prompts beyond those needed. extra: most prompts a step samples for places of filtered groups.
    last_step: of the stage; nothing is sampled for later ones.
    """

    prompts: int
    max_lag: int = 0
    updates: int = 1
    over_sampling: int = 0
    extra: int = 0
    last_step: int = 2**62

    @property
    def bound(self) -> int:
        """Optimizer steps a token may be older than the policy at the rollout's first update."""
        return self.max_lag * self.updates

    def wanted(self, step: int) -> int:
        """Groups in flight or ready while `step` waits for its own."""
        return self.prompts * (1 + min(self.max_lag, self.last_step - step)) + self.over_sampling


class Prefetching:
    """A RolloutSource. Every prompt it dispatches is trained on, filtered, dropped for a stated reason, or held.

    Every process takes the same prompts and keeps the same ledger; a ticket is sampled by the process that owns it. A
    step takes the oldest groups that are ready. It waits for those that would be too old for the next step, but for
    `over_sampling` of them: the requests of those are given up. With max_lag and over_sampling 0 and
    workers that sample inline, the groups depend on the seed alone, not on the layout.
    """

    def __init__(
        self,
        stream: PromptStream,
        workers: Workers,
        sieve: Sieve,
        pace: Pace,
        teams: Topology,
        version: Callable[[], int],
    ) -> None:
        """version: of the policy, as the engine holds it."""
        self._stream, self._workers, self._sieve, self._pace, self._teams = stream, workers, sieve, pace, teams
        self._version = version
        self._ledger = Ledger()
        self._buffer = Buffer(teams)
        self._resumed = False
        """Whether tickets are in flight that nobody samples yet."""

    def next_groups(self, step: int, metrics: StepMetrics) -> list[Group]:
        """Collective: this data-parallel rank's groups, in the order of their tickets.

        A place for which no group was left holds a filtered one without loss. Raises GppoError where a prompt is lost.
        """
        version, before = self._version(), self._ledger.totals
        self._begin_again(version)
        self._drop_stale(version)
        fillers, sampled = self._gather(step, version)
        chosen = sorted(self._ledger.ready)[: self._pace.prompts]
        fillers = fillers[: self._pace.prompts - len(chosen)]
        places = sorted([*chosen, *fillers])
        _measure_age([self._buffer.held[number] for number in chosen if number in self._buffer.held], version, metrics)
        groups = self._buffer.deal(places)
        self._ledger.train(chosen)
        self._drop_stragglers(version)
        self._check()
        measure(sampled, metrics)
        self._measure(before, len(fillers), metrics)
        return groups

    def state(self) -> Mapping[str, Any]:
        """Collective: the place in the data, the groups that are ready, and the prompts that are in flight."""
        held = self._teams.world.gather({number: group_to_json(group) for number, group in self._buffer.held.items()})
        groups = {number: group for part in held for number, group in part.items()}
        return ledger_to_json(self._ledger, groups, self._stream.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what was in flight is sampled anew. Raises CheckpointError where it is no such state, or
        one of other data."""
        self._ledger, groups = ledger_from_json(state, self._stream)
        for number, group in groups.items():
            if self._buffer.owns(number):
                self._buffer.put(number, group, silent=False)
        self._resumed = True

    def close(self) -> None:
        """Give up what is in flight."""
        self._workers.close()

    def _gather(self, step: int, version: int) -> tuple[list[int], list[Group]]:
        """Collective: sample until the step has its groups: (tickets filtered on the way, groups sampled here)."""
        wanted, taken = self._pace.wanted(step), 0
        budget = max(0, wanted - self._ledger.outstanding) + self._pace.extra
        filtered: list[int] = []
        sampled: list[Group] = []
        while True:
            count = max(0, min(wanted - self._ledger.outstanding, budget - taken))
            self._begin(self._draw(count, step, taken, version))
            taken += count
            filtered += self._arrive(sampled)
            if self._is_complete(version, exhausted=taken >= budget):
                return sorted(filtered), sampled
            self._workers.wait()

    def _is_complete(self, version: int, exhausted: bool) -> bool:
        if len(self._ledger.ready) < self._pace.prompts:
            return exhausted and not self._ledger.flying
        return sum(map(self._is_due(version), self._ledger.flying.values())) <= self._pace.over_sampling

    def _is_due(self, version: int) -> Callable[[Ticket], bool]:
        """Whether a ticket would be too old for the next step."""
        return lambda ticket: ticket.version + self._pace.bound < version + self._pace.updates

    def _draw(self, count: int, step: int, first_place: int, version: int) -> list[Ticket]:
        tickets: list[Ticket] = []
        for place in range(first_place, first_place + count):
            origin = self._stream.state()
            (prompt,) = self._stream.take(1)
            tickets.append(Ticket(self._ledger.totals.dispatched + len(tickets), prompt, origin, step, place, version))
        self._ledger.dispatch(tickets)
        return tickets

    def _begin_again(self, version: int) -> None:
        """What was in flight when the run was stopped is sampled by the weights of now."""
        if self._resumed:
            for number, ticket in self._ledger.flying.items():
                self._ledger.flying[number] = replace(ticket, version=version)
            self._begin(self._ledger.flying.values())
            self._resumed = False

    def _begin(self, tickets: Iterable[Ticket]) -> None:
        """Have this process's own ones sampled."""
        self._workers.begin([ticket for ticket in tickets if self._buffer.owns(ticket.number)])

    def _arrive(self, sampled: list[Group]) -> list[int]:
        """Collective: what came, on every process; the filtered tickets. sampled: gets the groups that came here."""
        finished = []
        for number, group in self._workers.take():
            sampled.append(group)
            treated = self._sieve.treated(group)
            reason = self._sieve.reason(treated)
            self._buffer.put(number, treated, silent=reason is not None)
            finished.append(Finished(number, _oldest(group), reason))
        came = sorted(
            (each for part in self._teams.world.gather(finished) for each in part), key=lambda each: each.number
        )
        for each in came:
            self._ledger.finish(each)
        return [each.number for each in came if each.reason is not None]

    def _drop_stale(self, version: int) -> None:
        """Groups that waited for too long."""
        ready = self._ledger.ready.items()
        self._drop([number for number, (_, oldest) in ready if version - oldest > self._pace.bound], "stale")

    def _drop_stragglers(self, version: int) -> None:
        """Requests that are not done, and would be too old for the next step."""
        is_due = self._is_due(version)
        late = [ticket.number for ticket in self._ledger.flying.values() if is_due(ticket)]
        self._workers.abandon([number for number in late if self._buffer.owns(number)])
        self._drop(late, "straggler")

    def _drop(self, numbers: Sequence[int], reason: str) -> None:
        self._ledger.drop(numbers, reason)
        self._buffer.forget(numbers)

    def _check(self) -> None:
        """Collective: what is dispatched has ended, or is really held by some process."""
        held = self._teams.world.gather((sorted(self._workers.flying), sorted(self._buffer.held)))
        self._ledger.check([n for flying, _ in held for n in flying], [n for _, ready in held for n in ready])

    def _measure(self, before: Totals, empty: int, metrics: StepMetrics) -> None:
        """`prompts/...`, the same on every process. Every name each time."""
        change = self._ledger.totals - before
        counts = {"dispatched": change.dispatched, "trained": change.trained, "empty_places": empty}
        counts |= {f"filtered_{each.name}": change.filtered[each.name] for each in self._sieve.filters}
        counts |= {f"dropped_{reason}": change.dropped[reason] for reason in DROPPED}
        counts |= {"in_flight": len(self._ledger.flying), "ready": len(self._ledger.ready)}
        for name, count in counts.items():
            metrics.add(f"prompts/{name}", Last(float(count)))


def _oldest(group: Group) -> int:
    """The oldest policy version that sampled any of its tokens."""
    return min(int(each.policy_versions[each.trainable].min()) for each in group.trajectories)


def _measure_age(groups: Sequence[Group], version: int, metrics: StepMetrics) -> None:
    """How many optimizer steps older than `version` the policies were that sampled the tokens to be trained on."""
    versions = [each.policy_versions[each.trainable] for group in groups for each in group.trajectories]
    ages = version - np.concatenate([np.zeros(0, dtype=np.int64), *versions])
    metrics.add("prompts/staleness", Mean(float(ages.sum()), float(len(ages))))
    metrics.add("prompts/staleness_max", Max(float(ages.max()) if len(ages) else -math.inf))
