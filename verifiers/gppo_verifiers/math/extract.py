"""Finds the final answer in a response. What stands in the thinking part is never an answer.

The thinking part ends at the last `</think>`; where `<think>` is opened and never closed, all that follows it is
thinking.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from gppo_verifiers.math.brackets import closing_brace

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BARE_BOX = re.compile(r"[^\s${}]+")
ANSWER_LINE = re.compile(r"(?:\banswer|答案)\W{0,3}?\s*[:：][\s*]*([^\n]*)", re.IGNORECASE)
ANSWER_LINE_CHARACTERS = 300
HASH_LINE = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")


@dataclass(frozen=True)
class Extractor:
    """find: the answer's text in a response, or None. write: a response that gives the answer in this form."""

    find: Callable[[str], str | None]
    write: Callable[[str], str]


def after_thinking(text: str) -> str:
    """The part of a response that counts."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` or `\fbox{}` holds, or the word after a `\boxed` without braces.

    None where the last box is empty or never closed: an earlier one is not what the response ends with.
    """
    return _last_box(after_thinking(text))


def answer_line(text: str) -> str | None:
    """What follows the last `Answer:` (or 答案：) in the last 300 characters, to the end of the line.

    The window is that of DAPO's reward: an answer that is followed by an essay is not the final one.
    """
    return _last_match(ANSWER_LINE, after_thinking(text)[-ANSWER_LINE_CHARACTERS:])


def answer_tags(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`; None where the last one is never closed."""
    _, opened, rest = after_thinking(text).rpartition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    return _inside_box(content) if opened and closed else None


def hash_line(text: str) -> str | None:
    """What follows the last `####`, to the end of the line: the form of GSM8K's solutions."""
    return _last_match(HASH_LINE, after_thinking(text))


def whole(text: str) -> str | None:
    """All that follows the thinking."""
    return after_thinking(text).strip() or None


def _last_box(text: str) -> str | None:
    found = None
    place = 0
    while box := BOX.search(text, place):
        place = box.end()
        if text[place : place + 1] == "{":
            end = closing_brace(text, place)
            found = None if end is None else text[place + 1 : end]
            place = place + 1 if end is None else end
        else:
            word = BARE_BOX.match(text, place)
            found = word.group().rstrip(".,;:") if word else None
    return _inside_box(found) if found else None


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    lines = pattern.findall(text)
    return _inside_box(lines[-1]) if lines else None


def _inside_box(content: str) -> str | None:
    """The content, or that of its last box: a response may well give the answer in two forms at once."""
    return (_last_box(content) if BOX.search(content) else content.strip()) or None


EXTRACTORS: dict[str, Extractor] = {
    "boxed": Extractor(boxed, lambda answer: f"\\boxed{{{answer}}}"),
    "answer_line": Extractor(answer_line, lambda answer: f"Answer: {answer}"),
    "answer_tags": Extractor(answer_tags, lambda answer: f"<answer>{answer}</answer>"),
    "hash_line": Extractor(hash_line, lambda answer: f"#### {answer}"),
    "whole": Extractor(whole, lambda answer: answer),
}
