"""Whether an output, or a returned value, is the expected one. Works on plain data that came out of a sandbox."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    """Whether `returned` is `expected`, as JSON knows values: a tuple is a list, and a key is text."""
    match expected, returned:
        case (str(), _) | (_, str()) | (None, _) | (_, None):
            return type(expected) is type(returned) and bool(expected == returned)
        case (int() | float(), int() | float()):
            return _same_number(expected, returned, comparison)
        case (list() | tuple(), list() | tuple()):
            return _same_lists(expected, returned, comparison)
        case (dict(), dict()):
            wanted, given = _by_text(expected), _by_text(returned)
            return wanted.keys() == given.keys() and all(
                same_value(wanted[key], given[key], comparison) for key in wanted
            )
    return False


def _same_lists(expected: Sequence[Any], returned: Sequence[Any], comparison: Comparison) -> bool:
    if len(expected) != len(returned):
        return False
    if comparison.mode != "unordered":
        return all(same_value(left, right, comparison) for left, right in zip(expected, returned, strict=True))
    left_over = list(returned)
    for wanted in expected:
        place = next((i for i, given in enumerate(left_over) if same_value(wanted, given, comparison)), None)
        if place is None:
            return False
        del left_over[place]
    return True


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


def _by_text(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in values.items()}
