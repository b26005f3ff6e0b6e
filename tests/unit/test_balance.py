"""Balancing: bounds that hold for any lengths."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gppo_megatron.data.balance import PackedRoom, PaddedRoom, Room, Work, first_fit, rebalanced, spread

WORKS = st.lists(st.lists(st.integers(1, 10_000), max_size=20), min_size=1, max_size=6)
LENGTHS = st.lists(st.integers(1, 50), max_size=40)
ROOMS = st.sampled_from([PackedRoom(), PackedRoom(4, 8), PaddedRoom(), PaddedRoom(8)])


def test_room_by_hand() -> None:
    assert PackedRoom().tokens([3, 5, 9]) == 17
    assert PackedRoom(slices=4, alignment=8).tokens([3, 5, 9]) == 24  # 4 + 8 + 12
    assert PackedRoom(slices=4, alignment=8).tokens([1]) == 8
    assert PaddedRoom().tokens([3, 5, 9]) == 27
    assert PaddedRoom(alignment=4).tokens([3, 5, 9]) == 36


def test_work_by_hand() -> None:
    assert Work(linear=10).of(10) == 200
    assert Work(linear=10).of(90) == 9000


@given(works=WORKS)
@settings(max_examples=200, deadline=None)
def test_ranks_differ_by_no_more_than_a_sequence(works: list[list[int]]) -> None:
    parts = rebalanced(works)
    assert sorted(place for part in parts for place in part) == sorted(
        (rank, item) for rank, mine in enumerate(works) for item in range(len(mine))
    )
    loads = [sum(works[rank][item] for rank, item in part) for part in parts]
    heavy = parts[loads.index(max(loads))]
    assert max(loads) <= max(map(sum, works))
    assert max(loads) - min(loads) <= min((works[rank][item] for rank, item in heavy), default=0)


def test_equal_ranks_exchange_nothing() -> None:
    assert rebalanced([[5, 3], [4, 4]]) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


@given(lengths=LENGTHS, room=ROOMS, budget=st.integers(56, 200), more=st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_the_budget_is_never_exceeded(lengths: list[int], room: Room, budget: int, more: int) -> None:
    packed = first_fit(lengths, room, budget)
    even = spread(lengths, room, budget, Work(linear=10), len(packed) + more)
    assert len(even) == len(packed) + more
    for bins in (packed, even):
        assert sorted(index for part in bins for index in part) == list(range(len(lengths)))
        assert all(room.tokens([lengths[index] for index in part]) <= budget for part in bins)


def test_micro_batches_get_equal_work() -> None:
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    bins = spread(lengths, PackedRoom(), 20, Work(linear=1000), 2)
    assert sorted(sum(lengths[index] for index in part) for part in bins) == [18, 18]
