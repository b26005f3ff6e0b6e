"""The groups that are ready, each on the process that sampled it, and their way to the ranks that train on them."""

from collections.abc import Iterable, Sequence

from gppo_megatron.rollout.filters import silenced
from gppo_megatron.types import Group, Topology


class Buffer:
    """This process's part. Tickets are dealt out in turn to the data-parallel ranks, and inside a replica again."""

    def __init__(self, teams: Topology) -> None:
        self._teams = teams
        self.held: dict[int, Group] = {}
        """Ready to be trained on, by ticket."""
        self._silent: dict[int, Group] = {}

    def owns(self, number: int) -> bool:
        """Whether a ticket is this process's to sample."""
        data, replica = self._teams.data, self._teams.replica
        return number % data.size == data.rank and number // data.size % replica.size == replica.rank

    def put(self, number: int, group: Group, silent: bool) -> None:
        """silent: it is not to be trained on, but may have to fill a place."""
        if silent:
            self._silent[number] = silenced(group)
        else:
            self.held[number] = group

    def forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.held.pop(number, None)

    def deal(self, places: Sequence[int]) -> list[Group]:
        """Collective: take the groups of these tickets out, and return those of this data-parallel rank: the groups of
        places rank, rank + size, ..., in order. Silent ones that no place needs are gone afterwards."""
        data, replica = self._teams.data, self._teams.replica
        consumer = {number: place % data.size for place, number in enumerate(places)}
        here = self.held | self._silent
        taken = {number: here[number] for number in places if number in here}
        leaving = {number: group for number, group in taken.items() if consumer[number] != data.rank}
        came = {number: group for part in data.gather(leaving) for number, group in part.items()}
        mine = {number: group for number, group in (taken | came).items() if consumer[number] == data.rank}
        whole = {number: group for part in replica.gather(mine) for number, group in part.items()}
        self.forget(taken)
        self._silent = {}
        return [whole[number] for number in places if consumer[number] == data.rank]
