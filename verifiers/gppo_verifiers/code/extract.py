"""Finds the program in a model's answer: its last fenced block. What stands in the thinking part never counts."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from textwrap import dedent

from gppo_verifiers.math.extract import after_thinking

FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^`]*+")
"""Without a way back: a line has one reading, found in linear time."""


@dataclass(frozen=True)
class Block:
    """language: the first word after the opening fence, in small letters."""

    language: str
    text: str


def last_block(text: str, languages: Collection[str]) -> str | None:
    """The program in `text`: the last block that names one of `languages`, or, where none does, the last that names
    none. A block that is never closed was cut off: then there is no program, whatever came before.
    """
    blocks = _blocks(after_thinking(text))
    if blocks is None:
        return None
    named = [block.text for block in blocks if block.language in languages]
    bare = [block.text for block in blocks if not block.language]
    return next(iter([*named[-1:], *bare[-1:]]), None)


def _blocks(text: str) -> list[Block] | None:
    """All closed blocks; None where the last is still open."""
    blocks: list[Block] = []
    fence, language, lines = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        found = FENCE.fullmatch(line.rstrip("\r\n"))
        if not fence:
            if found:
                fence, language, lines = found[1], found[2].lower(), []
        elif found and not found[2] and found[1][0] == fence[0] and len(found[1]) >= len(fence):
            blocks.append(Block(language, dedent("".join(lines))))
            fence = ""
        else:
            lines.append(line)
    return None if fence else blocks
