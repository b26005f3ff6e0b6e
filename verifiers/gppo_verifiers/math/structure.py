"""Answers made of several: tuples, lists, sets, intervals, matrices, ratios and inequalities."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from gppo_verifiers.math.brackets import CLOSING, OPENING, depths, split_outside
from gppo_verifiers.math.exact import read_number

GREEK = (
    "alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|(?:var)?phi"
    "|chi|psi|omega"
)
NAME = rf"(?:[A-Za-z]|\\(?:{GREEK}))(?:_(?:\w|\{{\w+\}}))?"
ASSIGNMENT = re.compile(rf"({NAME}'{{0,3}}(?:\([a-z](?:[,;][a-z])*\))?)=(?!.*=)(.+)")
MEMBERSHIP = re.compile(rf"{NAME}\\in(?![a-zA-Z])\s*(.+)")
SET_BUILDER = re.compile(rf"\\\{{{NAME}(?:\\in\\mathbb\{{R\}})?(?:\||:|\\mid(?![a-zA-Z]))\s*(.+)\\\}}")
LESS, GREATER = r"(<|\\le(?![a-zA-Z]))\s*", r"(>|\\ge(?![a-zA-Z]))\s*"
ONE_SIDE = r"([^<>=]+?)"
BETWEEN = {order: re.compile(rf"{ONE_SIDE}{order}({NAME}){order}{ONE_SIDE}") for order in (LESS, GREATER)}
HALF_LINE = {order: re.compile(rf"({NAME}){order}{ONE_SIDE}|{ONE_SIDE}{order}({NAME})") for order in (LESS, GREATER)}
RELATION = re.compile(r"<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])")
MATRIX = re.compile(r"\\begin\{pmatrix\}(.*?)\\end\{pmatrix\}", re.DOTALL)
INFINITY = re.compile(r"\+\\infty$")
ORDERED_BRACKETS = frozenset({"()", ""})
UNORDERED_BRACKETS = frozenset({"{}", ""})


@dataclass(frozen=True)
class Structure:
    """brackets: `()`, `[)`, `{}`, `:`, `matrix`, or nothing for a bare list; columns: of a matrix, else 0.

    A single thing without brackets is a bare list of one.
    """

    brackets: str
    parts: tuple[str, ...]
    columns: int = 0

    @property
    def is_single(self) -> bool:
        return self.brackets == "" and len(self.parts) == 1


def read_structure(text: str) -> Structure:
    """The structure of a normalised text."""
    if read_number(text) is not None:
        return Structure("", (text,))
    if (found := SET_BUILDER.fullmatch(text)) and (interval := _interval(found.group(1))):
        return interval
    if found := MEMBERSHIP.fullmatch(text):
        text = found.group(1)
    return _matrix(text) or _interval(text) or _enclosed(text) or _ratio(text) or _list(text)


def same_structure(gold: Structure, answer: Structure, equal: Callable[[str, str], bool]) -> bool:
    """Whether the parts match, in order unless both sides leave the order open.

    A bare list may stand for a tuple or a set; an open interval and a tuple are written alike. A matrix of one row or
    one column may be written as a tuple. Ratios may be written in larger terms.
    """
    if len(gold.parts) != len(answer.parts) or not _comparable(gold, answer):
        return False
    if gold.brackets == ":":
        return _proportional(gold.parts, answer.parts)
    if not {gold.brackets, answer.brackets} <= UNORDERED_BRACKETS:
        return all(equal(left, right) for left, right in zip(gold.parts, answer.parts, strict=True))
    left_over = list(answer.parts)
    for part in gold.parts:
        match = next((place for place, other in enumerate(left_over) if equal(part, other)), None)
        if match is None:
            return False
        del left_over[match]
    return True


def without_thousands(structure: Structure) -> Structure:
    """The other reading of a number such as 100,200."""
    if structure.is_single and read_number(structure.parts[0]) is not None:
        return Structure("", tuple(structure.parts[0].split(",")))
    return structure


def assignment(text: str) -> tuple[str, str]:
    """`y=2x+3` as its name and its value; the name is empty for anything else."""
    found = ASSIGNMENT.fullmatch(text)
    return (found.group(1), found.group(2)) if found else ("", text)


def _proportional(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    left, right = ([number.value for part in parts if (number := read_number(part))] for parts in (gold, answer))
    if not (all(left) and all(right)):
        return left == right  # a time of day, rather than a ratio
    return all(a * d == b * c for a, c in zip(left, right, strict=True) for b, d in zip(left, right, strict=True))


def _comparable(gold: Structure, answer: Structure) -> bool:
    if gold.columns and answer.columns:
        return gold.columns == answer.columns
    if gold.columns or answer.columns:
        matrix, other = (gold, answer) if gold.columns else (answer, gold)
        return other.brackets in ORDERED_BRACKETS and matrix.columns in (1, len(matrix.parts))
    both = {gold.brackets, answer.brackets}
    return len(both) == 1 or both <= ORDERED_BRACKETS or both <= UNORDERED_BRACKETS


def _matrix(text: str) -> Structure | None:
    found = MATRIX.fullmatch(text)
    if found is None:
        return None
    rows = [row.split("&") for row in found.group(1).split("\\\\") if row.strip()]
    columns = len(rows[0]) if rows else 0
    if not columns or any(len(row) != columns for row in rows):
        return None
    return Structure("matrix", tuple(cell.strip() for row in rows for cell in row), columns)


def _interval(text: str) -> Structure | None:
    """The interval that an inequality in one name stands for."""
    if not RELATION.search(text) or "," in text or ";" in text:
        return None
    for order in (LESS, GREATER):
        if found := BETWEEN[order].fullmatch(text):
            first, opening, _, closing, last = found.groups()
            return _between(first, opening, closing, last) if order == LESS else _between(last, closing, opening, first)
    for order in (LESS, GREATER):
        if found := HALF_LINE[order].fullmatch(text):
            name, before, above, below, after, _ = found.groups()
            bound, sign = (above, before) if name else (below, after)
            if bool(name) == (order == LESS):
                return _between(r"-\infty", "<", sign, bound)
            return _between(bound, sign, "<", r"\infty")
    return None


def _between(low: str, opening: str, closing: str, high: str) -> Structure:
    brackets = ("(" if opening in "<>" else "[") + (")" if closing in "<>" else "]")
    return Structure(brackets, (low.strip(), high.strip()))


def _enclosed(text: str) -> Structure | None:
    text = text.replace("\\{", "{").replace("\\}", "}") if text.startswith("\\{") and text.endswith("\\}") else text
    if len(text) < 3 or text[0] not in OPENING + "]" or text[-1] not in CLOSING + "[":
        return None
    inner = text[1:-1]
    around = depths(inner)
    if min(around) < 0 or around[-1] != 0:
        return None
    parts = tuple(INFINITY.sub(r"\\infty", part.strip()) for part in split_outside(inner, ",;"))
    if text[0] == "{" or text[-1] == "}":
        return Structure("{}", _both_signs(parts)) if text[0] + text[-1] == "{}" and "|" not in inner else None
    if len(parts) != 2 and "]" in text[0] + text[-1]:
        return None
    # ]2,4[ is how some countries write an open interval.
    opening = "(" if text[0] == "]" else text[0]
    closing = ")" if text[-1] == "[" else text[-1]
    return Structure(opening + closing, parts)


def _ratio(text: str) -> Structure | None:
    parts = tuple(part.strip() for part in split_outside(text, ":"))
    return Structure(":", parts) if len(parts) > 1 and all(map(read_number, parts)) else None


def _list(text: str) -> Structure:
    pieces = split_outside(text.replace(r"\cup", ","), ",;") if depths(text + " ")[-1] == 0 else [text]
    parts = tuple(part.strip() for part in pieces if part.strip())
    return Structure("", _both_signs(parts)) if parts else Structure("", (text,))


def _both_signs(parts: tuple[str, ...]) -> tuple[str, ...]:
    r"""`1\pm x` as the two numbers that it stands for."""
    result = []
    for part in parts:
        if part.count(r"\pm") == 1:
            result += [part.replace(r"\pm", "+").replace(r"\mp", "-"), part.replace(r"\pm", "-").replace(r"\mp", "+")]
        else:
            result.append(part)
    return tuple(result)
