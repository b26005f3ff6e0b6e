"""Values between processes: everything comes back as it was, of built-in types, and nothing else gets through."""

import contextlib
import json

import pytest
from gppo_verifiers.code.harness.gppo_values import UnsupportedError, decode, decode_unbuilt, encode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_a_value_comes_back_with_its_types(value):
    line = encode(value)
    assert "\n" not in line
    assert shape(decode(line)) == shape(value)


def shape(value):
    """The value with all its types written out, so that 1, 1.0 and True differ, and a set has an order."""
    match value:
        case list() | tuple():
            return (type(value).__name__, [shape(item) for item in value])
        case set():
            return ("set", sorted(map(repr, map(shape, value))))
        case dict():
            return ("dict", [(shape(key), shape(item)) for key, item in value.items()])
    return repr(value)


def test_integers_of_any_length_come_back():
    assert decode(encode([10**5000, -(7**9000)])) == [10**5000, -(7**9000)]


def test_an_object_that_equals_everything_does_not_get_through():
    class Equal:
        def __eq__(self, other):
            return True

    with pytest.raises(UnsupportedError, match="Equal"):
        encode([Equal()])


def test_subclasses_arrive_as_their_base():
    class Sly:
        def __eq__(self, other):
            return True

        __hash__ = None

    for base, value in ((list, [1]), (int, 3), (float, -0.0), (str, "a"), (tuple, (1,)), (dict, {1: 2})):
        kind = type("Sly", (Sly, base), {"__hash__": None})
        arrived = decode(encode(kind(value)))
        assert type(arrived) is base
        assert repr(arrived) == repr(value)


def test_a_value_nested_too_deeply_is_refused_on_both_sides():
    value = []
    for _ in range(200):
        value = [value]
    with pytest.raises(UnsupportedError):
        encode(value)
    loop = []
    loop.append(loop)
    with pytest.raises(UnsupportedError):
        encode(loop)
    with pytest.raises(ValueError, match="not a value"):
        decode('["l",' + '[["l",' * 150 + "[]" + "]]" * 150 + "]")
    with pytest.raises(ValueError, match="not a value"):
        decode("[" * 100_000)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "x",
        "{}",
        '{"a": 1}',
        "[]",
        "[1, 2]",
        '["o", "os.system"]',
        '["i", 3]',
        '["i", "zz"]',
        '["l", 3]',
        '["l", {}]',
        '["d", [[1]]]',
        '["d", [[["l", []], 1]]]',
        '["s", [["l", []]]]',
        '["c", [1, 2, 3]]',
        '["b", "0"]',
        "1 2",
        "1\n2",
    ],
)
def test_what_is_no_value_is_refused(line):
    with pytest.raises(ValueError, match="not a value"):
        decode(line)


def test_the_form_of_a_line():
    assert json.loads(encode({"a": (1, 2.5)})) == ["d", [["a", ["t", [1, 2.5]]]]]


FORGED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from("iltsdbc"),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(st.sampled_from("iltsdbc"), inner).map(list),
    max_leaves=12,
)


@pytest.mark.parametrize("read", [decode, decode_unbuilt])
@given(forged=FORGED)
def test_whatever_a_program_sends_is_a_value_or_a_value_error(read, forged):
    with contextlib.suppress(ValueError):
        read(json.dumps(forged))


@pytest.mark.parametrize("read", [decode, decode_unbuilt])
@pytest.mark.parametrize(
    "line", ['["c", [1' + "0" * 400 + ", 0]]", '["i", 5]', '[["l"], []]', '["s", 3]', '["d", [1]]']
)
def test_forged_values_are_refused(read, line):
    with pytest.raises(ValueError, match="^not a value: "):
        read(line)
