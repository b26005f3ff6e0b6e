"""Whether an output, or a returned value, is the expected one. Works on plain data that came out of a sandbox."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gppo_verifiers.code.harness.gppo_values import Unbuilt
from gppo_verifiers.code.types import Comparison

NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,4})?")
INTEGER = re.compile(r"[+-]?\d+")


def same_text(expected: str, printed: str, comparison: Comparison) -> bool:
    """Whether `printed` is what the comparison calls the same as `expected`."""
    match comparison.mode:
        case "exact":
            return expected == printed
        case "lines":
            return _lines(expected) == _lines(printed)
        case "tokens":
            return expected.split() == printed.split()
        case "unordered":
            return _sorted_lines(expected) == _sorted_lines(printed)
        case "floats":
            wanted, given = expected.split(), printed.split()
            return len(wanted) == len(given) and all(
                _same_token(left, right, comparison) for left, right in zip(wanted, given, strict=True)
            )


def same_value(expected: Any, returned: Any, comparison: Comparison) -> bool:
    """Whether `returned` is `expected`, as JSON knows values: a tuple is a list, and a key is text.

    In time nearly linear in the size of both, whatever a program returned: nothing of it is hashed but text.
    """
    match expected, returned:
        case (str(), _) | (_, str()) | (None, _) | (_, None):
            return type(expected) is type(returned) and bool(expected == returned)
        case (int() | float(), int() | float()):
            return _same_number(expected, returned, comparison)
        case (list() | tuple(), list() | tuple()):
            return _same_lists(expected, returned, comparison)
        case (dict(), dict() | Unbuilt(letter="d")):
            wanted, given = _by_text(expected), _by_text(returned)
            return (
                wanted is not None
                and given is not None
                and wanted.keys() == given.keys()
                and all(same_value(wanted[key], given[key], comparison) for key in wanted)
            )
    return False


def _same_lists(expected: Sequence[Any], returned: Sequence[Any], comparison: Comparison) -> bool:
    if len(expected) != len(returned):
        return False
    if comparison.mode != "unordered":
        return all(same_value(left, right, comparison) for left, right in zip(expected, returned, strict=True))
    wanted, given = _canonical(expected), _canonical(returned)
    return wanted is not None and wanted == given


def _canonical(value: Any) -> str | None:
    """A text that two values share where they are the same in any order; None for what equals nothing."""
    match value:
        case None:
            return "n"
        case str():
            return f"s{value}"
        case float() if not value.is_integer():
            return None if math.isnan(value) else f"f{value!r}"
        case int() | float():
            return f"i{int(value):x}"
        case list() | tuple():
            items = [_canonical(item) for item in value]
            return None if None in items else f"l{_joined(sorted(map(str, items)))}"
        case dict() | Unbuilt(letter="d") if (entries := _by_text(value)) is not None:
            pairs = [(key, _canonical(item)) for key, item in sorted(entries.items())]
            return (
                None
                if any(item is None for _, item in pairs)
                else f"d{_joined(str(x) for pair in pairs for x in pair)}"
            )
    return None


def _joined(texts: Iterable[str]) -> str:
    """One text for several, and another one for any others."""
    return "".join(f"{len(text)}:{text}" for text in texts)


def _same_number(expected: float, returned: float, comparison: Comparison) -> bool:
    if expected == returned:
        return True
    whole = isinstance(expected, int) and isinstance(returned, int)
    return comparison.mode == "floats" and not whole and _near(expected, returned, comparison)


def _same_token(expected: str, printed: str, comparison: Comparison) -> bool:
    if expected == printed:
        return True
    if not (NUMBER.fullmatch(expected) and NUMBER.fullmatch(printed)):
        return False
    if INTEGER.fullmatch(expected) and INTEGER.fullmatch(printed):
        return False
    return _near(float(expected), float(printed), comparison)


def _near(expected: float, given: float, comparison: Comparison) -> bool:
    try:
        wanted, got = float(expected), float(given)
    except OverflowError:
        return False
    if not (math.isfinite(wanted) and math.isfinite(got)):
        return False
    return abs(wanted - got) <= max(comparison.absolute, comparison.relative * abs(wanted))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _sorted_lines(text: str) -> list[list[str]]:
    return sorted(words for line in text.split("\n") if (words := line.split()))


def _by_text(values: Mapping[Any, Any] | Unbuilt) -> dict[str, Any] | None:
    """None where a key is no text, an integer of too many digits say: no expected one is."""
    try:
        return {str(key): value for key, value in (values.items if isinstance(values, Unbuilt) else values.items())}
    except ValueError:
        return None
