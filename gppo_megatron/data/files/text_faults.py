"""What is wrong with the text of a problem or of its known answer, whatever file it came from."""

import re
from collections.abc import Iterator

from gppo_megatron.data.files.faults import Finding

BROKEN = re.compile("[\ufffd\ud800-\udfff\x00]")
INVISIBLE = re.compile("[\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
# JSON reads "\frac" as a form feed and "rac": what a control character and the letters after it once were.
SWALLOWED = re.compile(
    "\x07(?:lpha|ngle|pprox)|\x08(?:oxed|egin|eta|inom|ar|mod)|\t(?:ext|imes|heta|frac|riangle)|"
    "\x0b(?:ec|ert|arphi)|\x0c(?:rac|orall)|\r(?:ight|ho|angle)"
)
CONTROL = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
IMAGE = re.compile(r"<image>|<img\b|!\[[^\]]*\]\(|\\includegraphics|<\|image", re.IGNORECASE)
ASY = re.compile(r"\[asy\]")
LEFTOVER = re.compile(
    r"<\|[a-z_]+\|>|\\boxed\{\s*\}|\\boxed\{your answer\}|solve the following math problem step by step|"
    r"put your answer on its own line|present the answer in latex format|let's think step by step|"
    r"please reason step by step",
    re.IGNORECASE,
)
MARKUP = re.compile(r"\\boxed|\\fbox|(?<!\\)\$|####|<<|answer\s*:|</?(?:think|answer)>", re.IGNORECASE)
NO_GOLD = frozenset({"", "nan", "none", "null", "n/a", "[]", "{}", "-", "?", "proof", "see solution", "see proof"})
GUESSABLE = re.compile(
    r"\(?[a-e]\)?|\\text\{\(?[a-e]\)?\}|yes|no|true|false|\\text\{(?:yes|no|true|false)\}", re.IGNORECASE
)
AROUND = 20
"""Characters shown on each side of what was found."""


def text_findings(text: str, template: bool) -> Iterator[Finding]:
    """The faults of a problem's text. template: whether one is to be put around it, so that it must bring none."""
    yield from _character_findings(text)
    yield from _matched("missing_image", IMAGE, text)
    yield from _matched("asy_figure", ASY, text)
    if template:
        yield from _matched("template_leftover", LEFTOVER, text)


def gold_findings(gold: str) -> Iterator[Finding]:
    """The faults of a known answer; whether the verifier can use it is for the verifier to say."""
    yield from _character_findings(gold)
    if MARKUP.search(gold):
        yield Finding("marked_up_gold", f"the answer is {gold[:80]!a}")
    if GUESSABLE.fullmatch(gold):
        yield Finding("guessable_gold", f"the answer is {gold!a}")


def is_missing(gold: str) -> bool:
    """Whether the text says that there is no answer."""
    return gold.strip().strip(".").lower() in NO_GOLD


def _character_findings(text: str) -> Iterator[Finding]:
    yield from _matched("broken_unicode", BROKEN, text)
    swallowed = SWALLOWED.search(text)
    if swallowed:
        yield _finding("swallowed_latex", swallowed)
    else:
        yield from _matched("invisible_characters", CONTROL, text)
    yield from _matched("invisible_characters", INVISIBLE, text)
    if "\r\n" in text:
        yield Finding("carriage_returns", "lines end in \\r\\n, written as \\n")


def _matched(fault: str, pattern: re.Pattern[str], text: str) -> Iterator[Finding]:
    match = pattern.search(text)
    if match:
        yield _finding(fault, match)


def _finding(fault: str, match: re.Match[str]) -> Finding:
    text, start, end = match.string, max(0, match.start() - AROUND), match.end() + AROUND
    before, after = "..." * (start > 0), "..." * (end < len(text))
    return Finding(fault, f"{before}{text[start:end]!a}{after}")
