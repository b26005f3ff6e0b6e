"""Judges the final answer of a response against the gold one.

A payload holds `gold` (an answer, or a list of which each is right), `extractor` (a name in `EXTRACTORS`) and
optionally `tolerance` (how far a number may be off, relative to the gold one).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gppo_verifiers.math.brackets import split_outside
from gppo_verifiers.math.exact import read_number, same_number
from gppo_verifiers.math.extract import EXTRACTORS
from gppo_verifiers.math.normalize import is_words, normalize, same_words, split_unit
from gppo_verifiers.math.structure import Structure, assignment, read_structure, same_structure, without_thousands
from gppo_verifiers.math.symbolic import MAX_CHARACTERS, UnreadableError, read, refusal, same_expression
from gppo_verifiers.types import Status, Verdict

RADIANS = frozenset({"", "rad", "radian", "radians"})
ELLIPSIS = r"\ldots"


def grade(payload: Mapping[str, Any], text: str) -> Verdict:
    """The verdict on `text`. Raises ValueError for a gold answer that cannot be read, and KeyError for the payload."""
    golds = [payload["gold"]] if isinstance(payload["gold"], str) else list(payload["gold"])
    extractor = EXTRACTORS[payload["extractor"]]
    if not golds:
        raise ValueError("there is no gold answer")
    golds = [_read_gold(gold) for gold in golds]
    content = extractor.find(text)
    if content is None:
        return Verdict(0.0, Status.UNPARSABLE, "no answer found")
    if len(content) > MAX_CHARACTERS:
        return Verdict(0.0, Status.UNPARSABLE, f"an answer longer than {MAX_CHARACTERS} characters")
    answer = normalize(content)
    unreadable = ""
    for gold in golds:
        try:
            if matches(gold, answer, payload.get("tolerance")):
                return Verdict(1.0, Status.GRADED, answer)
        except UnreadableError as error:
            unreadable = str(error)
    if unreadable:
        return Verdict(0.0, Status.UNPARSABLE, f"{unreadable}: {answer}")
    return Verdict(0.0, Status.GRADED, answer)


def self_check(gold: str, extractor: str = "boxed") -> str | None:
    """Why a response that gives the gold answer itself would not be graded as right; None where it would."""
    try:
        verdict = grade({"gold": gold, "extractor": extractor}, EXTRACTORS[extractor].write(gold))
    except ValueError as error:
        return str(error)
    return None if verdict.score == 1.0 else verdict.detail or "it does not equal itself"


def is_exact(gold: str) -> bool:
    """Whether the gold answer is a number that needs no sympy."""
    return read_number(split_unit(normalize(gold))[0]) is not None


def matches(gold: str, answer: str, tolerance: float | None = None) -> bool:
    """Whether two normalised answers are the same. Raises UnreadableError for an answer that is no mathematics."""
    if not answer:
        raise UnreadableError("an empty answer")
    if gold == answer:
        return True
    gold_number, answer_number = read_number(gold), read_number(answer)
    if gold_number and answer_number:
        return same_number(gold_number, answer_number, tolerance)
    if is_words(gold) or is_words(answer):
        return _same_words(gold, answer)
    if reason := refusal(answer):
        raise UnreadableError(reason)
    gold_core, gold_unit = split_unit(gold)
    answer_core, answer_unit = split_unit(answer)
    if gold_unit or answer_unit:
        return _same_with_units(gold_core, gold_unit, answer_core, answer_unit, tolerance)
    return _same_formula(gold, answer, tolerance)


def _same_words(gold: str, answer: str) -> bool:
    if not is_words(gold):
        raise UnreadableError("words, and no formula")
    return same_words(gold, answer)


def _same_with_units(gold: str, gold_unit: str, answer: str, answer_unit: str, tolerance: float | None) -> bool:
    """A unit may be left out, by the gold answer or by the answer; two units must be the same."""
    if gold_unit == "degrees" and answer_unit in RADIANS and r"\pi" in answer:
        return matches(rf"\frac{{({gold})\pi}}{{180}}", answer, tolerance)
    if gold_unit and answer_unit and gold_unit.rstrip("s") != answer_unit.rstrip("s"):
        return False
    return matches(gold, answer, tolerance)


def _same_formula(gold: str, answer: str, tolerance: float | None) -> bool:
    gold_name, gold_value = assignment(gold)
    answer_name, answer_value = assignment(answer)
    if (gold_name or answer_name) and (
        gold_name == answer_name or (not gold_name and "=" not in gold) or (not answer_name and "=" not in answer)
    ):
        return matches(gold_value, answer_value, tolerance)
    gold_parts, answer_parts = read_structure(gold), read_structure(answer)
    # 100,200 may be two numbers, where the other side is two.
    if not answer_parts.is_single:
        gold_parts = without_thousands(gold_parts)
    elif not gold_parts.is_single:
        answer_parts = without_thousands(answer_parts)
    if gold_parts.is_single and answer_parts.is_single:
        return _same_single(gold, answer, tolerance)
    if _is_opaque(gold_parts) or _is_opaque(answer_parts):
        return same_expression(read(gold), read(answer), tolerance)
    return same_structure(gold_parts, answer_parts, lambda left, right: matches(left, right, tolerance))


def _same_single(gold: str, answer: str, tolerance: float | None) -> bool:
    if ELLIPSIS in (gold, answer):
        return False
    sides = split_outside(answer, "=")
    if len(sides) > 1 and len(split_outside(gold, "=")) == 1:
        # 2+3=5 says what 5 says, and 3=5 does not.
        return all(matches(gold, side, tolerance) for side in sides)
    if r"\ln" in gold + answer:
        # Without a base, log is the natural one where the other side says so.
        gold, answer = (_natural(text) for text in (gold, answer))
    return same_expression(read(gold), read(answer), tolerance)


def _natural(text: str) -> str:
    return text.replace(r"\log", r"\ln") if r"\log_" not in text else text


def _is_opaque(parts: Structure) -> bool:
    """A single formula that may still stand for several things, such as a set."""
    return parts.is_single and read_number(parts.parts[0]) is None


@lru_cache(maxsize=65536)
def _read_gold(gold: str) -> str:
    """The normalised gold answer. Raises ValueError where it, or a part of it, cannot be read."""
    if not gold.strip():
        raise ValueError("the gold answer is empty")
    text = normalize(gold)
    if not text:
        raise ValueError(f"the gold answer {gold!r} holds nothing")
    try:
        _check(text)
    except UnreadableError as error:
        raise ValueError(f"the gold answer {gold!r} cannot be read: {error}") from error
    return text


def _check(text: str) -> None:
    if read_number(text) is not None or is_words(text) or text == ELLIPSIS:
        return
    if reason := refusal(text):
        raise UnreadableError(reason)
    core, unit = split_unit(text)
    _, value = assignment(core)
    parts = read_structure(value)
    if parts.is_single and not unit and value == text:
        read(text)
        return
    for part in parts.parts:
        _check(part)
