"""Values on their way between processes: JSON that keeps tuples, sets, bytes and keys that are no text apart.

Whoever decodes gets built-in types and nothing else: no object of the sender's classes, no code. A number, a text, a
truth value and None stand for themselves; all else is [letter, content].
"""

import json
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
LONG_INTEGER = 10**4000
"""From here on an integer travels in hexadecimal, which takes time linear in its length."""


class Unbuilt:
    """A dict (letter "d", items: pairs) or a set ("s") of somebody else's, not built.

    Who chooses the keys can choose such as collide, and building one then takes time quadratic in their number.
    """

    def __init__(self, letter: str, items: "list[Any]") -> None:
        self.letter, self.items = letter, items


class UnsupportedError(Exception):
    """A value that does not travel; the message names its type."""


def encode(value: Any) -> str:
    """One line of JSON. An instance of a subclass goes as its built-in base. Raises UnsupportedError."""
    try:
        return json.dumps(_pack(value, MAX_DEPTH))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedError(str(error)) from None


def decode(text: "str | bytes") -> Any:
    """What `encode` was given, of exact built-in types. Raises ValueError for anything that `encode` does not write."""
    return _decoded(text, READERS)


def decode_unbuilt(text: "str | bytes") -> Any:
    """As `decode`, in time linear in the length of `text`: dicts and sets come as `Unbuilt`."""
    return _decoded(text, READERS_UNBUILT)


def _decoded(text: "str | bytes", readers: "dict[str, Reader]") -> Any:
    try:
        return _unpack(json.loads(text), MAX_DEPTH, readers)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"not a value: {error}") from None


def _pack(value: Any, depth: int) -> Any:  # noqa: C901 - one row a type
    if depth == 0:
        raise UnsupportedError("nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__add__(value, "")
    if isinstance(value, int):
        number = int.__pos__(value)
        return number if -LONG_INTEGER < number < LONG_INTEGER else ["i", hex(number)]
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, list):
        return ["l", [_pack(item, depth - 1) for item in list.__iter__(value)]]
    if isinstance(value, tuple):
        return ["t", [_pack(item, depth - 1) for item in tuple.__iter__(value)]]
    if isinstance(value, dict):
        return ["d", [[_pack(key, depth - 1), _pack(item, depth - 1)] for key, item in dict.items(value)]]
    if isinstance(value, (set, frozenset)):
        return ["s", [_pack(item, depth - 1) for item in set().union(value)]]
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    if isinstance(value, complex):
        return ["c", [value.real, value.imag]]
    raise UnsupportedError(f"a value of type {type(value).__name__}")


def _unpack(packed: Any, depth: int, readers: "dict[str, Reader]") -> Any:
    if depth == 0:
        raise ValueError("nested too deeply")
    if not isinstance(packed, list):
        if isinstance(packed, dict):
            raise ValueError("an object")
        return packed
    letter, content = packed
    return readers[letter](content, depth - 1, readers)


def _items(content: Any, depth: int, readers: "dict[str, Reader]") -> "list[Any]":
    if not isinstance(content, list):
        raise ValueError("no list of items")
    return [_unpack(item, depth, readers) for item in content]


def _pairs(content: Any, depth: int, readers: "dict[str, Reader]") -> "list[tuple[Any, Any]]":
    return [(_unpack(key, depth, readers), _unpack(item, depth, readers)) for key, item in content]


Reader = Callable[[Any, int, Any], Any]
READERS: "dict[str, Reader]" = {
    "i": lambda content, depth, readers: int(content, 16),
    "l": _items,
    "t": lambda content, depth, readers: tuple(_items(content, depth, readers)),
    "s": lambda content, depth, readers: set(_items(content, depth, readers)),
    "d": lambda content, depth, readers: dict(_pairs(content, depth, readers)),
    "b": lambda content, depth, readers: bytes.fromhex(content),
    "c": lambda content, depth, readers: complex(*content),
}
READERS_UNBUILT: "dict[str, Reader]" = {
    **READERS,
    "s": lambda content, depth, readers: Unbuilt("s", _items(content, depth, readers)),
    "d": lambda content, depth, readers: Unbuilt("d", _pairs(content, depth, readers)),
}
