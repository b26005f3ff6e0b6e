"""Numbers as they are written, read without rounding and without sympy."""

import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

MAX_EXPONENT = 1000

DIGITS = r"(?:[1-9]\d{0,2}(?:[, ]\d{3})+|\d+)"
DECIMAL = rf"(?:{DIGITS}(?:\.\d*)?|\.\d+)"
PLAIN = re.compile(rf"([+-]?)({DECIMAL})(?:(?:[eE]|(?:\\times|\\cdot)10\^)\{{?([+-]?\d{{1,4}})\}}?)?(%?)")
POWER = re.compile(r"([+-]?)(\d{1,6})\^\{?([+-]?\d{1,4})\}?")
PART = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"
FRACTION = re.compile(rf"([+-]?)(?:(\d+) ?)?\\frac\{{({PART})\}}\{{({PART})\}}(%?)")
QUOTIENT = re.compile(rf"([+-]?)(?:(\d+) )?({PART})/({PART})(%?)")
REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d{1,40})\}?(%?)")
BASED = re.compile(r"(\d[0-9A-Za-z]*|[A-Z]+\d[0-9A-Z]*|[A-F]{2,})_\{?(\d{1,2})\}?")


class Decision(Enum):
    """What the exact comparison says."""

    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"  # at least one of the two is no number


@dataclass(frozen=True)
class Number:
    """value: with a percent sign, the number before it. base: what a subscript says. digits: of whole numbers."""

    value: Fraction
    percent: bool = False
    digits: str = ""
    base: int | None = None


def read_number(text: str) -> Number | None:
    """The number that the normalised `text` is; None for anything else.

    Reads 1,000 as a thousand, `1 1/4` and `1\\frac{1}{4}` as mixed numbers where the fraction is a proper one.
    """
    if found := PLAIN.fullmatch(text):
        sign, digits, exponent, percent = found.groups()
        power = int(exponent or 0)
        if abs(power) > MAX_EXPONENT:
            return None
        figures = re.sub("[, ]", "", digits)
        bare = figures.isdigit() and not exponent
        return Number(
            Fraction(sign + figures) * Fraction(10) ** power,
            bool(percent),
            digits=(sign.strip("+") + (figures.lstrip("0") or "0")) if bare else "",
        )
    if found := POWER.fullmatch(text):
        sign, base, exponent = found.groups()
        power = int(exponent)
        if abs(power) > MAX_EXPONENT or (int(base) == 0 and power <= 0):
            return None
        return Number(Fraction(f"{sign}1") * Fraction(base) ** power)
    if found := FRACTION.fullmatch(text) or QUOTIENT.fullmatch(text):
        return _fraction(*found.groups())
    if found := REPEATING.fullmatch(text):
        return _repeating(*found.groups())
    if found := BASED.fullmatch(text):
        return _based(found.group(1), int(found.group(2)))
    return None


def decide(gold: str, answer: str, tolerance: float | None = None) -> Decision:
    """Compares two normalised texts; tolerance is relative to the gold number."""
    gold_number, answer_number = read_number(gold), read_number(answer)
    if gold_number is None or answer_number is None:
        return Decision.UNDECIDED
    return Decision.RIGHT if same_number(gold_number, answer_number, tolerance) else Decision.WRONG


def same_number(gold: Number, answer: Number, tolerance: float | None = None) -> bool:
    """Whether the numbers are equal, or differ by no more than `tolerance` times the gold one.

    A number in a base equals another by its digits and base, or the number that it is in base ten; if only the gold
    number names a base, the question asked for it and the digits are enough. A percent sign may be missing from either
    side, as both 50 and 0.5 may stand for 50%.
    """
    if gold.base is not None:
        if answer.base is None:
            return answer.digits == gold.digits and not answer.percent
        return (gold.digits, gold.base) == (answer.digits, answer.base)
    return any(_near(left, right, tolerance) for left, right in _readings(gold, answer))


def _readings(gold: Number, answer: Number) -> list[tuple[Fraction, Fraction]]:
    plain = (gold.value, answer.value)
    if gold.percent == answer.percent:
        return [plain]
    hundredth = (gold.value / 100, answer.value) if gold.percent else (gold.value, answer.value / 100)
    return [plain, hundredth]


def _near(gold: Fraction, answer: Fraction, tolerance: float | None) -> bool:
    if tolerance is None:
        return gold == answer
    return abs(gold - answer) <= Fraction(tolerance) * abs(gold)


def _fraction(sign: str, whole: str | None, numerator: str, denominator: str, percent: str) -> Number | None:
    top, bottom = Fraction(numerator), Fraction(denominator)
    if bottom == 0:
        return None
    if whole is not None and not (0 <= top < bottom and numerator.isdigit() and denominator.isdigit()):
        return None
    return Number(Fraction(f"{sign}1") * (int(whole or 0) + top / bottom), bool(percent))


def _repeating(sign: str, whole: str, fixed: str, period: str, percent: str) -> Number:
    value = Fraction(int(whole + fixed or 0)) + Fraction(int(period), 10 ** len(period) - 1)
    return Number(Fraction(f"{sign}1") * value / 10 ** len(fixed), bool(percent))


def _based(digits: str, base: int) -> Number | None:
    if not 2 <= base <= 36:
        return None
    try:
        value = int(digits, base)
    except ValueError:
        return None
    return Number(Fraction(value), digits=digits.lstrip("0").upper() or "0", base=base)
