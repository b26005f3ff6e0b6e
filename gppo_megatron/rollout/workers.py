"""Who samples tickets: the process itself while it waits, or servers while it trains."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from gppo_megatron.metrics import StepMetrics
from gppo_megatron.rollout.collect import Collector
from gppo_megatron.rollout.engine import Completion, Request
from gppo_megatron.rollout.tickets import Ticket
from gppo_megatron.types import Group

MOMENT_SECONDS = 0.2


class Workers(Protocol):
    """Samples and judges the groups of this process's tickets."""

    def begin(self, tickets: Sequence[Ticket]) -> None: ...

    def take(self) -> list[tuple[int, Group]]:
        """The groups that were finished since the last call, by ticket. Raises what sampling raised."""
        ...

    def wait(self) -> None:
        """Until there is something to take, or a moment is over."""
        ...

    def abandon(self, numbers: Iterable[int]) -> None:
        """Give up these tickets: their groups never come."""
        ...

    @property
    def flying(self) -> frozenset[int]:
        """Tickets begun and neither taken nor given up."""
        ...

    def close(self) -> None:
        """Give up everything."""
        ...


@dataclass
class Inline:
    """Samples where `begin` is called, all tickets of one call together: each must be of one step."""

    collector: Collector
    _done: list[tuple[int, Group]] = field(default_factory=list)

    def begin(self, tickets: Sequence[Ticket]) -> None:
        if tickets:
            groups = self.collector.collect(
                [ticket.prompt for ticket in tickets],
                [ticket.place for ticket in tickets],
                tickets[0].step,
                StepMetrics(),
            )
            self._done += zip((ticket.number for ticket in tickets), groups, strict=True)

    def take(self) -> list[tuple[int, Group]]:
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Nothing is ever under way."""

    def abandon(self, numbers: Iterable[int]) -> None:
        gone = set(numbers)
        self._done = [(number, group) for number, group in self._done if number not in gone]

    @property
    def flying(self) -> frozenset[int]:
        return frozenset(number for number, _ in self._done)

    def close(self) -> None:
        self._done = []


class Beginning(Protocol):
    """An engine that samples while its caller does something else; `rollout.fleet.Fleet` is one."""

    def begin(self, batches: Sequence[Sequence[Request]]) -> list["Future[list[Completion]]"]:
        """For each batch what `Engine.generate` would return. Cancelling one gives its requests up."""
        ...


class Background:
    """Samples by an engine that works by itself; a thread judges each group as it comes.

    open_collector: called in that thread, since a judge may be used in the thread it was made in alone.
    """

    def __init__(self, engine: Beginning, open_collector: Callable[[], Collector]) -> None:
        self._engine = engine
        self._judging = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._collector = self._judging.submit(open_collector).result()
        self._changed = threading.Condition()
        self._sampling: dict[int, Future[list[Completion]]] = {}
        self._judged: dict[int, Future[Group]] = {}

    def begin(self, tickets: Sequence[Ticket]) -> None:
        batches = [self._collector.requests(ticket.prompt, ticket.place, ticket.step) for ticket in tickets]
        futures = self._engine.begin(batches)
        self._sampling |= {ticket.number: future for ticket, future in zip(tickets, futures, strict=True)}
        for ticket, future in zip(tickets, futures, strict=True):
            future.add_done_callback(partial(self._sampled, ticket))

    def take(self) -> list[tuple[int, Group]]:
        with self._changed:
            done = sorted(number for number, judged in self._judged.items() if judged.done())
            judged = [(number, self._judged.pop(number)) for number in done]
        # What was given up while it was judged is nobody's.
        taken = [(number, group) for number, group in judged if self._sampling.pop(number, None) is not None]
        return [(number, group.result()) for number, group in taken]

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: any(judged.done() for judged in self._judged.values()), MOMENT_SECONDS)

    def abandon(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._sampling.pop(number).cancel()

    @property
    def flying(self) -> frozenset[int]:
        return frozenset(self._sampling)

    def close(self) -> None:
        """May be called twice."""
        self.abandon(list(self._sampling))
        with suppress(RuntimeError):  # closed already
            self._judging.submit(self._collector.judge.close).result()
        self._judging.shutdown()

    def _sampled(self, ticket: Ticket, sampled: "Future[list[Completion]]") -> None:
        """In the engine's thread."""
        if not sampled.cancelled():
            with self._changed:
                judged = self._judging.submit(self._judge, ticket, sampled)
                self._judged[ticket.number] = judged
            judged.add_done_callback(self._notify)

    def _judge(self, ticket: Ticket, sampled: "Future[list[Completion]]") -> Group:
        (group,) = self._collector.judged([ticket.prompt], sampled.result())
        return group

    def _notify(self, judged: "Future[Group]") -> None:
        with self._changed:
            self._changed.notify_all()
