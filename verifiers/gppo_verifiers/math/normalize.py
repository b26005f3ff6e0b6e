"""Writes the same thing always the same way: what unicode, LaTeX and habit offer several forms for.

Nothing here changes what a text means; `split_unit` alone takes something off, and hands it back.
"""

import re
import unicodedata

from gppo_verifiers.math.brackets import closing_brace, depths

SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "π": r"\pi ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "⩽": r"\le ", "⩾": r"\ge ", "∅": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "≈": r"\approx ",
    "°": r"^\circ ", "º": r"^\circ ", "⁄": "/", "…": r"\ldots ", "、": ",", "。": "", "〈": "(", "〉": ")",
    "⟨": "(", "⟩": ")", "ℝ": r"\mathbb{R}", "√": r"\sqrt ",
}  # fmt: skip
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n", strict=True))

FUNCTIONS = "sqrt|pi|sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan|infty"
REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|boldsymbol)(?![a-zA-Z])\s*", ""),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\l(?:brack)(?![a-zA-Z])", "["),
        (r"\\r(?:brack)(?![a-zA-Z])", "]"),
        (r"\\(?:varnothing|O)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\leq(?:slant)?(?![a-zA-Z])|<=", r"\\le "),
        (r"\\geq(?:slant)?(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:dots|cdots)(?![a-zA-Z])|\.\.\.", r"\\ldots "),
        (r"\\[bBvp]matrix|\\begin\{(?:bmatrix|Bmatrix|array)\}(?:\{[lcr|]*\})?", r"\\begin{pmatrix}"),
        (r"\\end\{(?:bmatrix|Bmatrix|array)\}", r"\\end{pmatrix}"),
        (r"\\(?:textbf|textit|textrm|textsf|mbox|mathrm|mathsf|mathit|rm|bf)\s*(?=\{)", r"\\text"),
        (r"\\text\{\s*([A-Za-z])\s*\}(?=\^|\})", r"\1"),
        (r"\\text\{\s*([eid])\s*\}", r"\1"),
        (r"\\text\{\s*(\d+)\s*\}", r"\1"),
        (r"\\text\{\s*\}", ""),
        (r"\\(?:underline|mathbf|bm|color\s*\{\w+\}|textcolor\s*\{\w+\})\s*(?=\{)", ""),
        (r"^\s*\\approx(?![a-zA-Z])", ""),
        (r"(?<=\S)\s*\\approx(?![a-zA-Z]).*$", ""),
        (r"\^\s*\{\s*\\circ\s*\}|\\degree(?![a-zA-Z])", r"^\\circ "),
        (r"\^\s*\\circ", r"^\\circ "),
        (r"\\%|\\text\{\s*(?:percent|per cent)\s*\}| percent$", "%"),
        (r"\\\$|\\text\{\s*\$\s*\}", ""),
        (r"\$", " "),
        (r"\{,\}|,\\!", ","),
        (r"(?<=\d)(?:\\[,;:! ]|~)(?=\d{3}(?!\d))", " "),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\*\*|`", " "),
        (r"\*", r"\\cdot "),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\cdotp(?![a-zA-Z])", r"\\cdot "),
        (rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
        (r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))\s*,?", ";"),
        (r"\\frac\s*([0-9A-Za-z])", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}"),
        (r"(\\frac\{[^{}]*\})\s*(\\[a-z]+)(?![a-zA-Z{])", r"\1{\2}"),
        (r"\\sqrt\s*(\d+|[A-Za-z])(?=\W|\d|$|[A-Za-z])", r"\\sqrt{\1}"),
        (r"([\^_])\s*\{\s*([0-9A-Za-z])\s*\}", r"\1\2"),
        (r",\s+", ";"),
        (r"\s+", " "),
        (r"(\\[a-zA-Z]+) (?![a-zA-Z])", r"\1"),
        (r"(?<![0-9A-Za-z}%]) | (?![0-9A-Za-z])", ""),
    )
)
LEAD = re.compile(
    r"^(?:(?:the )?(?:final )?answer(?: is|:)|\\text\{(?![^{}]*n(?:o|')t)[^{}]*(?:is|are|equals|[=:])\s*\})\s*", re.I
)
DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\u00ad]")
ROOT = re.compile(r"\\sqrt\s*\(")

WORDS = re.compile(r"[A-Za-z][A-Za-z0-9 ,.'’\-]*")
SHORT_WORDS = frozenset({"yes", "no", "odd"})
LONG_WORD = re.compile(r"[A-Za-z]{4,}|(?<![A-Za-z])[A-Z][a-z]+")

SHORT_UNITS = "mm|cm|km|dm|kg|mg|ml|mL|ft|in|lb|lbs|oz|mi|hr|hrs|mph|kmh|min|sec|rad|AM|PM|am|pm|Hz|kHz|kJ|kW"
POWERED = r"(?:\^\{?-?[1-6]\}?)?"
WORDED = rf"\\text\{{ ?[A-Za-z ./]+\}}{POWERED}"
UNIT = re.compile(
    rf"(?:/?{WORDED}(?:(?:/|\\cdot)?{WORDED})*|\^\\circ(?:\\text\{{ ?[CFK]\}}|[CFK])?"
    rf"| (?:[A-Za-z]{{3,}}|{SHORT_UNITS}){POWERED}(?:[ /](?:[A-Za-z]{{2,}}|[a-z]){POWERED})*"
    rf"|(?:{SHORT_UNITS}){POWERED})$"
)
ANGLE_OF = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)[^a-zA-Z].*\^\\circ$")
NO_UNIT = re.compile(r"(?<![A-Za-z])(?:or|and|not|is|are|if|for|where|plus|minus|times|mod)(?![A-Za-z])")


def normalize(text: str) -> str:
    r"""One form of an answer: `\dfrac12` and `½` become `\frac{1}{2}`, `１２` becomes `12`.

    A comma before a blank becomes a semicolon: `1, 234` is a list, and `1,234` may be a number.
    """
    text = _latin(text).strip().strip("*` \n")
    text = _undelimited(text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = _undelimited(_braced_roots(text).strip())
    text = LEAD.sub("", text) or text
    return _bare(text.strip().rstrip(".,;:\\").strip())


def is_words(text: str) -> bool:
    """Whether the normalised text is words and no formula: `Evelyn`, `No solution`."""
    if WORDS.fullmatch(text) is None:
        return False
    return LONG_WORD.search(text) is not None or text.casefold() in SHORT_WORDS


def same_words(left: str, right: str) -> bool:
    """Whether two texts are the same but for capitals, blank space and marks."""
    return re.findall(r"[a-z0-9]+", left.casefold()) == re.findall(r"[a-z0-9]+", right.casefold())


def split_unit(text: str) -> tuple[str, str]:
    r"""The normalised text without its unit, and the unit as plain letters: `10\text{ cm}` gives `10` and `cm`."""
    found = UNIT.search(text)
    if found is None or found.start() == 0 or NO_UNIT.search(found.group()) or ANGLE_OF.search(text):
        return text, ""
    unit = found.group().replace(r"^\circ", "degrees ").replace(r"\text", "").replace(r"\cdot", "")
    return text[: found.start()].rstrip(" "), re.sub(r"[^A-Za-z0-9/^-]+", "", unit)


def _latin(text: str) -> str:
    """Unicode's own forms of what LaTeX writes in ASCII."""
    result = []
    raised = lowered = ""
    for character in [*INVISIBLE.sub("", text), ""]:
        if raised and character not in SUPERSCRIPTS:
            result.append(f"^{{{raised}}}")
            raised = ""
        if lowered and character not in SUBSCRIPTS:
            result.append(f"_{{{lowered}}}")
            lowered = ""
        if character in SUPERSCRIPTS and character:
            raised += SUPERSCRIPTS[character]
        elif character in SUBSCRIPTS and character:
            lowered += SUBSCRIPTS[character]
        elif character in SYMBOLS:
            result.append(SYMBOLS[character])
        elif character and unicodedata.decomposition(character).startswith("<fraction>"):
            numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("⁄")
            result.append(f"\\frac{{{numerator}}}{{{denominator}}}")
        else:
            result.append(unicodedata.normalize("NFKC", character))
    return "".join(result)


def _undelimited(text: str) -> str:
    """Without the marks that only say: this is mathematics."""
    for opening, closing in DELIMITERS:
        inner = text.removeprefix(opening).removesuffix(closing)
        if len(inner) == len(text) - len(opening) - len(closing) and closing not in inner:
            return inner.strip()
    return text


def _braced_roots(text: str) -> str:
    r"""`\sqrt(x)`, which is no LaTeX, as `\sqrt{x}`."""
    while found := ROOT.search(text):
        start = found.end() - 1
        end = next((place for place, depth in enumerate(depths(text[start:])) if depth == 0), None)
        if end is None:
            break
        text = f"{text[: found.start()]}\\sqrt{{{text[start + 1 : start + end]}}}{text[start + end + 1 :]}"
    return text


def _bare(text: str) -> str:
    """Without brackets, braces or `\\text{}` around the whole, where they hold one thing."""
    while True:
        inner = None
        if text.startswith("\\text{") and closing_brace(text, 5) == len(text) - 1:
            inner = text[6:-1]
        elif text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
            inner = text[1:-1]
        elif text.startswith("(") and text.endswith(")"):
            around = depths(text)
            if 0 not in around[:-1] and around[-1] == 0 and not _has_comma(text, around):
                inner = text[1:-1]
        if not inner or not inner.strip():
            return text
        text = inner.strip()


def _has_comma(text: str, around: list[int]) -> bool:
    return any(character in ",;" and depth == 1 for character, depth in zip(text, around, strict=True))
