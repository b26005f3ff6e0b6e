"""Each prompt that is sampled, followed from the data to its end: none is lost, and none is used twice."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gppo_megatron.data.prompts import StreamState
from gppo_megatron.errors import GppoError
from gppo_megatron.types import Prompt


@dataclass(frozen=True)
class Ticket:
    """One prompt on its way. number: 0, 1, ... over the whole run. origin: the stream's state before it was taken.

    step, place: of its dispatch, which seed its random numbers. version: of the policy when it was dispatched.
    """

    number: int
    prompt: Prompt
    origin: StreamState
    step: int
    place: int
    version: int


@dataclass(frozen=True)
class Finished:
    """A ticket whose group is sampled and judged. oldest: the oldest policy version that sampled a token of it.

    reason: the filter that drops it; None where it may be trained on.
    """

    number: int
    oldest: int
    reason: str | None


@dataclass(frozen=True)
class Totals:
    """Prompts since the run's beginning. filtered, dropped: by reason."""

    dispatched: int = 0
    trained: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def __sub__(self, before: "Totals") -> "Totals":
        return Totals(
            self.dispatched - before.dispatched,
            self.trained - before.trained,
            self.filtered - before.filtered,
            self.dropped - before.dropped,
        )

    @property
    def ended(self) -> int:
        return self.trained + self.filtered.total() + self.dropped.total()


class Ledger:
    """Where every ticket stands; the same on every process.

    A ticket is in flight, then either filtered or ready, then trained on; on the way it may be dropped.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.flying: dict[int, Ticket] = {}
        self.ready: dict[int, tuple[Ticket, int]] = {}

    @property
    def outstanding(self) -> int:
        return len(self.flying) + len(self.ready)

    def dispatch(self, tickets: Sequence[Ticket]) -> None:
        self._count(dispatched=len(tickets))
        self.flying |= {ticket.number: ticket for ticket in tickets}

    def finish(self, finished: Finished) -> None:
        ticket = self.flying.pop(finished.number)
        if finished.reason is None:
            self.ready[finished.number] = (ticket, finished.oldest)
        else:
            self._count(filtered=Counter([finished.reason]))

    def train(self, numbers: Iterable[int]) -> None:
        self._count(trained=sum(self.ready.pop(number) is not None for number in numbers))

    def drop(self, numbers: Iterable[int], reason: str) -> None:
        for number in numbers:
            del (self.flying if number in self.flying else self.ready)[number]
            self._count(dropped=Counter([reason]))

    def check(self, flying: Iterable[int], ready: Iterable[int]) -> None:
        """Raises GppoError unless all that was dispatched has ended, or is held: in flight, or ready, somewhere.

        flying, ready: the numbers that all processes really hold.
        """
        held_flying, held_ready = sorted(flying), sorted(ready)
        missing = self.totals.dispatched - self.totals.ended - len(held_flying) - len(held_ready)
        if missing or held_flying != sorted(self.flying) or held_ready != sorted(self.ready):
            raise GppoError(
                f"prompts are not conserved: {self.totals.dispatched} dispatched, {self.totals.trained} trained on, "
                f"{self.totals.filtered.total()} filtered, {self.totals.dropped.total()} dropped, but "
                f"{len(held_flying)} in flight and {len(held_ready)} ready where {len(self.flying)} and "
                f"{len(self.ready)} should be; this is a fault of the program: go on from the last checkpoint"
            )

    def _count(
        self, dispatched: int = 0, trained: int = 0, filtered: Mapping[str, int] = {}, dropped: Mapping[str, int] = {}
    ) -> None:
        self.totals = Totals(
            self.totals.dispatched + dispatched,
            self.totals.trained + trained,
            self.totals.filtered + Counter(filtered),
            self.totals.dropped + Counter(dropped),
        )
