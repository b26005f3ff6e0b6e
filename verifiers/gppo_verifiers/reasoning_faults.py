"""Known faults of reasoning-gym 0.1.25's verifiers, and what is done instead; found by trying wrong answers on all.

A task without a row is judged by reasoning-gym alone.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """What is wrong with a task's verifier, and the remedy.

    readable: pattern an answer must match as a whole, else it is unparsable and never reaches the verifier.
    right: decides in the verifier's place.
    raises: what the verifier raises on answers it cannot read; they count as unparsable.
    """

    reason: str
    readable: str = ""
    right: Callable[[str, Entry], bool] | None = None
    raises: tuple[type[Exception], ...] = ()


NO_FAULT = Fault("")


def _same_text(text: str, entry: Entry) -> bool:
    """Equal but for the amount of blank space within lines and around commas."""
    return _words(text) == _words(entry["answer"])


def _same_text_any_case(text: str, entry: Entry) -> bool:
    return _words(text.casefold()) == _words(entry["answer"].casefold())


def _words(text: str) -> list[list[str]]:
    return [line.replace(",", " , ").split() for line in text.strip().splitlines()]


def _same_json(text: str, entry: Entry) -> bool:
    try:
        return bool(json.loads(text) == json.loads(entry["answer"]))
    except (ValueError, RecursionError):
        return False


def _same_numbers(text: str, entry: Entry) -> bool:
    """Equal lists of numbers, as JSON or with quotes of either kind around each."""
    try:
        return _numbers(text) == _numbers(entry["answer"])
    except (ValueError, TypeError, InvalidOperation, RecursionError):
        return False


def _numbers(text: str) -> list[Decimal]:
    numbers = [Decimal(str(number)) for number in json.loads(text.replace("'", '"'))]
    if not all(number.is_finite() for number in numbers):
        raise ValueError("a list holds a number that is not finite")
    return numbers


def _near_fraction(text: str, entry: Entry) -> bool:
    """Within 1e-4, reasoning-gym's own tolerance for a probability, and within 1 %: 0 is not a small probability."""
    reference = Fraction(entry["answer"])
    return abs(Fraction(text.strip()) - reference) <= min(Fraction(1, 10_000), reference / 100)


def _makes_target(text: str, entry: Entry) -> bool:
    """Whether + - * / over exactly the puzzle's numbers gives its target, in exact arithmetic."""
    metadata = entry["metadata"]
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        used = Counter(_leaves(tree))
        return used == Counter(metadata["numbers"]) and _value(tree) == metadata.get("target", 24)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _leaves(tree: ast.AST) -> Iterator[int]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, int))


def _value(tree: ast.AST) -> Fraction:
    match tree:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise ValueError(f"{ast.dump(tree)} is not + - * / over whole numbers")


_ARITHMETIC = r"[\d \t\n+\-*/()]{1,200}"
_SYMBOLIC = r"(?:(?:a?(?:sin|cos|tan)h?|exp|log|sqrt|pi|[A-Za-z])(?![A-Za-z_\d])|[\d\s+\-*/^().])*"
_RUNS_CODE = "its verifier runs the answer as Python"

FAULTS: dict[str, Fault] = {
    "arc_agi": Fault("its verifier needs tuples, which JSON does not keep", right=_same_text),
    "binary_matrix": Fault(_RUNS_CODE, readable=r"[\d\s]*"),
    "boxnet": Fault(
        "its verifier raises on answers that are not moves on the grid",
        raises=(TypeError, AttributeError, KeyError, IndexError),
    ),
    "calendar_arithmetic": Fault(
        "its verifier gives more than 1 to wrong numbers where the reference is negative", right=_same_text_any_case
    ),
    "coin_flip": Fault(
        "its verifier accepts any prefix of the reference, e.g. 0",
        readable=r"\s*(?:(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})(?:e-?\d{1,2})?|\d{1,20}/0*[1-9]\d{0,20})\s*",
        right=_near_fraction,
    ),
    "complex_arithmetic": Fault("its verifier accepts nan", readable=r"[\d\s+\-.ij*()]*"),
    "countdown": Fault(_RUNS_CODE, readable=_ARITHMETIC, right=_makes_target),
    "figlet_font": Fault("its verifier accepts any answer with ten right letters", right=_same_text_any_case),
    "game_of_life": Fault("its verifier accepts extra cells, and raises on a JSON object", right=_same_json),
    "game_of_life_halting": Fault(
        "its verifier accepts every answer", readable=r"\s*(?:True|False)\s*", right=_same_text
    ),
    "letter_jumble": Fault("its verifier accepts text after the right words", right=_same_text_any_case),
    "n_queens": Fault(_RUNS_CODE, readable=r"[Q_\s]*"),
    "number_sorting": Fault("its verifier accepts numbers wrong by 1, and NaN", right=_same_numbers),
    "polynomial_equations": Fault(
        "its verifier accepts any text where there is no real root", readable=r"[\d\s.,+\-]*"
    ),
    "polynomial_multiplication": Fault(_RUNS_CODE, readable=_SYMBOLIC),
    "prime_factorization": Fault(
        "its verifier raises on text that is not numbers", readable=r"\s*\d{1,40}(?:\s*×\s*\d{1,40}){0,100}\s*"
    ),
    "puzzle24": Fault(
        f"{_RUNS_CODE}, accepts other numbers than the puzzle's, and rounds 24.9 to 24",
        readable=_ARITHMETIC,
        right=_makes_target,
    ),
    "rearc": Fault("its verifier needs tuples, which JSON does not keep", right=_same_text),
    "simple_integration": Fault(_RUNS_CODE, readable=_SYMBOLIC),
    "spell_backward": Fault("its verifier accepts text after the right word", right=_same_text_any_case),
    "spiral_matrix": Fault(_RUNS_CODE, readable=r"[\d\s-]*"),
    "string_insertion": Fault(_RUNS_CODE, readable=r"[A-Za-z]*"),
    "word_sorting": Fault("its verifier accepts words after the right ones", right=_same_text),
}

REFUSED: dict[str, str] = {
    "composite": "it mixes tasks whose options a worker does not know; name one task",
    "intermediate_integration": "some of its references are unevaluated integrals, and so its verifier must accept "
    "the question itself as the answer",
}

REFERENCES: dict[str, Callable[[Entry], str]] = {
    "graph_color": lambda entry: json.dumps(entry["metadata"]["possible_answer"]),
    "propositional_logic": lambda entry: str(entry["metadata"]["example_answer"]),
    "rubiks_cube": lambda entry: str(entry["metadata"]["example_correct_answer"]),
}
"""Tasks with many right answers, whose entries keep one of them elsewhere than under `answer`."""

_PATTERNS = {name: re.compile(fault.readable) for name, fault in FAULTS.items() if fault.readable}


def is_readable(task: str, text: str) -> bool:
    """Whether `text` may be shown to the task's verifier."""
    pattern = _PATTERNS.get(task)
    return pattern is None or pattern.fullmatch(text) is not None
