"""Matching brackets in LaTeX, where `\\{` is a bracket of the text and `{` one of the language."""

import re

OPENING = "([{"
CLOSING = ")]}"


def closing_brace(text: str, opening: int) -> int | None:
    """Where the `{` at `opening` is closed; None if it never is. Escaped braces do not count."""
    depth = 0
    place = opening
    while place < len(text):
        match text[place]:
            case "\\":
                place += 1
            case "{":
                depth += 1
            case "}":
                depth -= 1
                if depth == 0:
                    return place
        place += 1
    return None


def balanced(text: str) -> bool:
    """Whether every brace of the language is closed, and none that was not opened."""
    depth = 0
    for brace in re.sub(r"\\.", "", text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def depths(text: str) -> list[int]:
    """How many brackets of any kind are open after each character; below 0 where more are closed than opened."""
    depth = 0
    result = []
    for character in text:
        depth += (character in OPENING) - (character in CLOSING)
        result.append(depth)
    return result


def split_outside(text: str, separators: str) -> list[str]:
    """`text` cut at the separators that lie in no bracket: `(1,2),3` at "," gives `(1,2)` and `3`."""
    parts = [""]
    for character, depth in zip(text, depths(text), strict=True):
        if depth == 0 and character in separators:
            parts.append("")
        else:
            parts[-1] += character
    return parts
