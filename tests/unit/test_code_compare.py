"""Comparison of outputs and values."""

import time

import pytest
from gppo_verifiers.code.compare import same_text, same_value
from gppo_verifiers.code.harness.gppo_values import decode_unbuilt, encode
from gppo_verifiers.code.types import Comparison
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("mode", "expected", "printed", "same"),
    [
        ("exact", "1\n", "1\n", True),
        ("exact", "1\n", "1", False),
        ("lines", "1 2\n3\n", "1 2  \r\n3", True),
        ("lines", "1 2\n", "1 2\n\n\n", True),
        ("lines", "1 2\n", "1  2\n", False),
        ("lines", "1\n2\n", "1\n\n2\n", False),
        ("lines", " 1", "1", False),
        ("tokens", "1 2\n3", " 1\n2   3 ", True),
        ("tokens", "1 2 3", "1 2", False),
        ("tokens", "1.0", "1", False),
        ("floats", "0.5", "0.5000001", True),
        ("floats", "0.5", "0.51", False),
        ("floats", "1000000.0", "1000000.9", True),  # within 1e-6 of it
        ("floats", "1000000.0", "1000001.1", False),
        ("floats", "3", "3.0", True),
        ("floats", "10000000", "10000001", False),  # whole numbers are equal or not
        ("floats", "yes 1.0", "no 1.0", False),
        ("floats", "1.0", "nan", False),
        ("floats", "1.0", "inf", False),
        ("floats", "1e999", "2e999", False),
        ("floats", "1.0 2.0", "1.0", False),
        ("unordered", "b a\nc\n", "c\nb  a\n\n", True),
        ("unordered", "a\na\nb\n", "a\nb\nb\n", False),
    ],
)
def test_texts(mode, expected, printed, same):
    assert same_text(expected, printed, Comparison(mode)) is same


@pytest.mark.parametrize(
    ("mode", "expected", "returned", "same"),
    [
        ("lines", [1, [2, 3]], (1, (2, 3)), True),
        ("lines", [1, 2], [2, 1], False),
        ("lines", [1, 2], [1, 2, 3], False),
        ("lines", "1", 1, False),
        ("lines", None, 0, False),
        ("lines", None, None, True),
        ("lines", "", None, False),
        ("lines", True, True, True),
        ("lines", 1, 1.0, True),
        ("lines", 0.1 + 0.2, 0.3, False),
        ("floats", 0.1 + 0.2, 0.3, True),
        ("floats", [0.5, "a"], [0.5000001, "a"], True),
        ("floats", 10**7, 10**7 + 1, False),
        ("floats", 1.0, 10**400, False),
        ("floats", 1.0, float("nan"), False),
        ("lines", {"1": 2}, {1: 2}, True),
        ("lines", {"1": 2}, {1: 2, 3: 4}, False),
        ("lines", [1, 2], {1, 2}, False),
        ("lines", {"a": 1}, ["a"], False),
        ("unordered", [[1, 2], [3]], [[3], [2, 1]], True),
        ("unordered", [1, 1, 2], [1, 2, 2], False),
        ("unordered", [1.0, True, "1"], ["1", 1, 1], True),
        ("unordered", ["1", "23"], ["12", "3"], False),
        ("unordered", [["a"], []], [["a", []]], False),
        ("unordered", [{"a": [1, 2]}, None], [None, {"a": [2, 1]}], True),
        ("unordered", [0.5, -0.0], [0, 0.5], True),
        ("unordered", [1.0], [float("nan")], False),
        ("lines", {"1": 2}, {10**5000: 2}, False),  # a key of more digits than Python writes out
    ],
)
def test_values(mode, expected, returned, same):
    assert same_value(expected, returned, Comparison(mode)) is same


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text("ab:1", max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


def same_by_pairs(left, right):
    """`unordered`, by trying each of one against each of the other."""
    if isinstance(left, list) and isinstance(right, list):
        rest = list(right)
        for item in left:
            place = next((i for i, other in enumerate(rest) if same_by_pairs(item, other)), None)
            if place is None:
                return False
            del rest[place]
        return not rest
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_by_pairs(left[key], right[key]) for key in left)
    if any(isinstance(value, str | list | dict | None) for value in (left, right)):
        return type(left) is type(right) and left == right
    return left == right


@given(st.lists(PLAIN, max_size=4), st.lists(PLAIN, max_size=4), st.randoms(use_true_random=False))
def test_unordered_is_what_trying_all_pairs_finds(left, right, random):
    shuffled = random.sample(left, len(left))
    assert same_value(left, shuffled, Comparison("unordered"))
    assert same_value(left, right, Comparison("unordered")) is same_by_pairs(left, right)


COLLIDING = [number * (2**61 - 1) for number in range(40_000)]
"""All of one hash: a set or a dict of them takes half a minute and more to build."""


@pytest.mark.parametrize("mode", ["lines", "unordered"])
@pytest.mark.parametrize(
    "line",
    [
        '["s", [' + ", ".join(map(str, COLLIDING)) + "]]",
        '["d", [' + ", ".join(f"[{number}, 0]" for number in COLLIDING) + "]]",
        encode(COLLIDING),
    ],
    ids=["set", "dict", "list"],
)
def test_values_that_collide_take_no_longer_than_others(mode, line):
    began = time.process_time()
    returned = decode_unbuilt(line)
    assert not same_value([1, *COLLIDING[:0:-1]], returned, Comparison(mode))
    assert not same_value({"1": 0}, returned, Comparison(mode))
    assert time.process_time() - began < 8
