"""Which sequences go together: pure arithmetic on lengths. Work is in one unit throughout, tokens squared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Room(Protocol):
    """What the tensors of one micro-batch hold, padding included, in tokens."""

    def tokens(self, lengths: Sequence[int]) -> int: ...


@dataclass(frozen=True)
class PackedRoom:
    """End to end: each length a multiple of `slices`, and the whole one of `alignment`."""

    slices: int = 1
    alignment: int = 1

    def tokens(self, lengths: Sequence[int]) -> int:
        return _up(sum(_up(length, self.slices) for length in lengths), self.alignment)


@dataclass(frozen=True)
class PaddedRoom:
    """Side by side: each as long as the longest, which is a multiple of `alignment`."""

    alignment: int = 1

    def tokens(self, lengths: Sequence[int]) -> int:
        return len(lengths) * _up(max(lengths, default=0), self.alignment)


@dataclass(frozen=True)
class Work:
    """length x (linear + length): the matrices' cost and attention's; linear: the length at which they are equal."""

    linear: int

    def of(self, length: int) -> int:
        return length * (self.linear + length)


class Place(NamedTuple):
    """Sequence number `item` of those that `rank` has."""

    rank: int
    item: int


def rebalanced(works: Sequence[Sequence[int]]) -> list[list[Place]]:
    """Which sequences each rank is to have; works: of those each has now.

    Few are moved: from the rank with most work to the one with least, as long as that makes them more equal. In the
    end they differ by no more than the smallest sequence of the former.

    >>> [[tuple(place) for place in places] for places in rebalanced([[5, 1, 1], [1]])]
    [[(0, 0)], [(1, 0), (0, 1), (0, 2)]]
    """
    parts = [[Place(rank, item) for item in range(len(mine))] for rank, mine in enumerate(works)]
    loads = [sum(mine) for mine in works]
    while True:
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[heavy] - loads[light]
        smaller = [place for place in parts[heavy] if 0 < works[place.rank][place.item] < gap]
        if not smaller:
            return parts
        moved = min(smaller, key=lambda place: abs(gap - 2 * works[place.rank][place.item]))
        parts[heavy].remove(moved)
        parts[light].append(moved)
        loads[heavy] -= works[moved.rank][moved.item]
        loads[light] += works[moved.rank][moved.item]


def first_fit(lengths: Sequence[int], room: Room, budget: int) -> list[list[int]]:
    """Indices in as few micro-batches as longest-first filling finds, each within the budget; every length is."""
    bins: list[list[int]] = []
    for index in _longest_first(lengths):
        fitting = next((part for part in bins if _fits(part, index, lengths, room, budget)), None)
        if fitting is None:
            bins.append([index])
        else:
            fitting.append(index)
    return bins


def spread(lengths: Sequence[int], room: Room, budget: int, work: Work, count: int) -> list[list[int]]:
    """Indices in exactly `count` micro-batches of nearly equal work, each within the budget; some may be empty.

    count: at least as many as `first_fit` finds; its own result, filled up, stands where a budget leaves no choice.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in _longest_first(lengths):
        fitting = [part for part in bins if _fits(part, index, lengths, room, budget)]
        if not fitting:
            packed = first_fit(lengths, room, budget)
            return packed + [[] for _ in range(count - len(packed))]
        min(fitting, key=lambda part: sum(work.of(lengths[member]) for member in part)).append(index)
    return bins


def _fits(part: Sequence[int], index: int, lengths: Sequence[int], room: Room, budget: int) -> bool:
    return room.tokens([lengths[member] for member in (*part, index)]) <= budget


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
