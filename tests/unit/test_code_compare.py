"""Comparison of outputs and values."""

import pytest
from gppo_verifiers.code.compare import same_text, same_value
from gppo_verifiers.code.types import Comparison


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
    ],
)
def test_values(mode, expected, returned, same):
    assert same_value(expected, returned, Comparison(mode)) is same
