"""Texts that are the same but for white space, and texts that share long runs of words."""

import hashlib
import re
from collections.abc import Iterator

GRAM = 13
WORD = re.compile(r"\w+")


def normalised(text: str) -> str:
    """The text with every run of white space a single space."""
    return " ".join(text.split())


def digest(text: str) -> bytes:
    """16 bytes that stand for the normalised text."""
    # A text that holds half of a surrogate pair must have a digest before it can be reported.
    return hashlib.blake2b(normalised(text).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class TextIndex:
    """The texts of one set of problems, to look those of another up in."""

    def __init__(self) -> None:
        self._exact: dict[bytes, str] = {}
        self._grams: dict[int, str] = {}

    def add(self, text: str, place: str) -> None:
        """place: what to say of a text that is found again."""
        self._exact.setdefault(digest(text), place)
        for gram in _grams(text):
            self._grams.setdefault(gram, place)

    def same(self, text: str) -> str | None:
        """The place of a text that differs from this one in white space alone."""
        return self._exact.get(digest(text))

    def similar(self, text: str) -> str | None:
        """The place of a text that shares 13 words in a row with this one; case and white space do not count."""
        return next((self._grams[gram] for gram in _grams(text) if gram in self._grams), None)


def _grams(text: str) -> Iterator[int]:
    words = WORD.findall(text.lower())
    for start in range(len(words) - GRAM + 1):
        yield hash(tuple(words[start : start + GRAM]))
