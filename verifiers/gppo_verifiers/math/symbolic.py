"""Compares expressions with sympy through math-verify, in whatever time that takes: the caller keeps the clock.

Its own time-outs are off: they interrupt no computation in C, and they need the main thread.
"""

import logging
import re
from functools import lru_cache
from importlib.metadata import version
from math import prod
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef

from gppo_verifiers.math.brackets import balanced, depths
from gppo_verifiers.math.exact import read_number

MAX_CHARACTERS = 500
MAX_DEPTH = 30
MAX_EXPONENT = 100_000
MAX_FACTORIAL = 10_000
MAX_TERMS = 1000
DIGITS = 50
EXACT, FLOATING = 1e-40, 1e-12
"""How far apart, relatively, numbers may be that are equal; sympy's floats carry 15 digits."""

EXPONENT = re.compile(r"(?<![)}])\^\{?[+-]?(\d+)")
BRACKET_EXPONENT = re.compile(r"[)}]\^\{?[+-]?(\d+)")
TOWER = re.compile(r"\^\{[^}]*[\d)]\^|\^\([^)]*[\d)]\^|\^\w\^")
FACTORIAL = re.compile(r"(\d+)!")
FACTORIAL_OF_BRACKET = re.compile(r"[)}\]!]!")
HARMLESS_FACTORIAL = re.compile(r"\((?=[^()]*[a-z])[^()\\^!]{1,12}\)!")
BINOMIAL = re.compile(r"\\binom\{(\d+)\}")
GROUP = r"(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[a-z]+|\S)"
LOOP = re.compile(rf"\\(?:sum|prod)(?![a-zA-Z])(?:_{GROUP})?(?:\^{GROUP})?")
NAMED = re.compile(r"\\(?:mathbb|mathcal|mathbf|operatorname|text|begin|end)\{[^{}]*\}|\\[a-zA-Z]+")
PROSE = re.compile(r"[A-Za-z]{4,}")
# What math-verify drops, and then reads the rest.
NO_FORMULA = re.compile(r"\\text|\\ldots|[:'\"#@?]")
DEGREES = re.compile(r"(\d+(?:\.\d+)?)\^\\circ")
BASE = re.compile(r"\d_")
CONSTANTS = {"i": sympy.I, "e": sympy.E}
NO_NUMBERS = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)

READING = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True,
        units=False,  # it takes the m off 6m
        malformed_operators=True,
        nits=True,
        boxed="all",
        equations=False,
    ),
)

# It warns, once, that its time-outs are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class UnreadableError(ValueError):
    """A text that is no mathematics, or that is refused as too costly to evaluate."""


def grader_version() -> str:
    """What decides the verdicts that need sympy; other versions decide some of them differently."""
    packages = ("math-verify", "latex2sympy2_extended", "sympy")
    return " ".join(f"{package}={version(package)}" for package in packages)


def refusal(text: str) -> str | None:
    """Why the normalised `text` is not evaluated, or None. What it lets through may still be slow, never by design."""
    if len(text) > MAX_CHARACTERS:
        return f"longer than {MAX_CHARACTERS} characters"
    if max(depths(text), default=0) > MAX_DEPTH:
        return f"more than {MAX_DEPTH} nested brackets"
    if any(map(_too_many, LOOP.findall(text))):
        return f"a sum or product of more than {MAX_TERMS} terms"
    text = LOOP.sub(" ", text)
    if TOWER.search(text) or _largest_power(text) > MAX_EXPONENT:
        return "a tower of exponents, or one too large"
    numbers = [int(number) for number in FACTORIAL.findall(text) + BINOMIAL.findall(text)]
    if max(numbers, default=0) > MAX_FACTORIAL or FACTORIAL_OF_BRACKET.search(HARMLESS_FACTORIAL.sub("", text)):
        return "a factorial of a number too large, or of an expression"
    return None


@lru_cache(maxsize=4096)
def read(text: str) -> Any:
    """The sympy object that the normalised `text` stands for.

    Raises UnreadableError where it is refused, where math-verify reads nothing, or where what it reads lacks a name
    that the text has: a parser that stops early leaves some other expression behind.
    """
    if reason := refusal(text):
        raise UnreadableError(reason)
    if number := read_number(text):
        return sympy.Rational(number.value) / (100 if number.percent else 1)
    text = text.replace(";", ",")
    if PROSE.search(NAMED.sub(" ", text)):
        raise UnreadableError("words, and no formula")
    if BASE.search(text):
        raise UnreadableError("numbers with a base in an expression")
    if found := NO_FORMULA.search(text):
        raise UnreadableError(f"a formula with {found.group()} in it")
    if not balanced(text):
        raise UnreadableError("unbalanced braces")
    text = DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    found = parse(f"\\boxed{{{text}}}", [READING], fallback_mode="no_fallback", parsing_timeout=None)
    if len(found) != 1 or isinstance(found[0], str):
        raise UnreadableError("no formula that can be read")
    lost = _names_in_text(text) - _names_in(found[0]) - {"e", "i", "d"}
    if lost:
        raise UnreadableError(f"only a part of it can be read: {', '.join(sorted(lost))} is lost")
    return found[0]


def same_expression(gold: Any, answer: Any, tolerance: float | None = None) -> bool:
    """Whether two sympy objects are equal; numbers to 40 digits, or to `tolerance` times the gold one."""
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        floating = FLOATING if gold.has(sympy.Float) or answer.has(sympy.Float) else EXACT
        near = _near(gold, answer, max(floating, tolerance or 0.0))
        names = {symbol.name for symbol in gold.free_symbols | answer.free_symbols}
        if near is False or (near and names <= CONSTANTS.keys()):
            return near
        if near is None and (infinite := _same_infinite(gold, answer)) is not None:
            return infinite
    return bool(
        verify(
            gold,
            answer,
            float_rounding=12,
            numeric_precision=DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
    )


def _near(gold: sympy.Expr, answer: sympy.Expr, bound: float) -> bool | None:
    """Whether the two are equal as numbers, at a point of their variables; None where one of them is no number there.

    Where they differ, no algebra can make them equal, and algebra is slow: (a+b+c)^99 need not be multiplied out.
    """
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: CONSTANTS.get(symbol.name, sympy.Rational(2 * k + 37, 11)) for k, symbol in enumerate(symbols)}
    left, right = _value(gold, point), _value(answer, point)
    if left is None or right is None:
        return None
    return bool(abs(left - right) <= bound * abs(left))


def _same_infinite(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Whether two expressions, one of which is infinite or undefined, are the same; None where neither is.

    math-verify takes a difference that is infinite for none.
    """
    left, right = gold.doit(), answer.doit()
    if not (left.has(*NO_NUMBERS) or right.has(*NO_NUMBERS)):
        return None
    return bool(left == right) and left is not sympy.nan


def _value(expression: sympy.Expr, point: dict[sympy.Symbol, sympy.Expr]) -> Any:
    """The number that an expression is at the point, to 50 digits; None where it is none."""
    if expression.atoms(AppliedUndef):
        return None
    real, imaginary = expression.subs(point).evalf(DIGITS).as_real_imag()
    if not (real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite):
        return None
    return _significant(real) + _significant(imaginary) * sympy.I


def _significant(number: Any) -> Any:
    """Zero for what evaluates to nothing but rounding."""
    return sympy.Integer(0) if number.is_Float and number._prec == 1 else number


def _names_in_text(text: str) -> set[str]:
    return {character for character in NAMED.sub(" ", text).casefold() if character.isalpha()}


def _names_in(thing: Any) -> set[str]:
    names = {str(symbol) for symbol in thing.atoms(sympy.Symbol)}
    names |= {str(function.func) for function in thing.atoms(AppliedUndef)}
    return set("".join(names).casefold())


def _largest_power(text: str) -> int:
    """At most how large an exponent gets when powers of brackets, such as (2^9)^9, are multiplied out."""
    outer = prod(map(int, BRACKET_EXPONENT.findall(text)))
    return outer * max(map(int, EXPONENT.findall(text)), default=1)


def _too_many(loop: str) -> bool:
    """Whether the limits of a sum or product may be far apart: a power, a factorial, a large number."""
    limits = loop.replace("^", "", 1)
    return "^" in limits or "!" in limits or any(int(number) > MAX_TERMS for number in re.findall(r"\d+", limits))
