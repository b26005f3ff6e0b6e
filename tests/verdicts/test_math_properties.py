"""Whole kinds of answers: pairs that are equal by construction, and pairs that are not."""

from fractions import Fraction

from gppo_verifiers.math.grading import grade
from hypothesis import assume, given, settings
from hypothesis import strategies as st

integers = st.integers(-(10**9), 10**9)
naturals = st.integers(1, 999)
surroundings = st.sampled_from(
    ["{}", "So $ {} $.", "<think>\\boxed{{7}}</think>\n{}", "\\boxed{{-1}}? No: {}", "{} hence $x=3$.", "\\[ {} \\]"]
)


def right(gold: str, answer: str, around: str = "{}") -> bool:
    verdict = grade({"gold": gold, "extractor": "boxed"}, around.format(f"\\boxed{{{answer}}}"))
    assert verdict.score in (0.0, 1.0)
    return verdict.score == 1.0


def integer_forms(number: int) -> st.SearchStrategy[str]:
    grouped = f"{number:,}"
    digits = str(number)
    return st.sampled_from(
        [
            digits,
            grouped,
            grouped.replace(",", "{,}"),
            grouped.replace(",", r"\,"),
            grouped.replace(",", r",\!"),
            digits + ".0",
            digits + ".",
            digits.replace("-", "−"),
            digits.translate({ord("0") + k: ord("０") + k for k in range(10)}),
            f"${digits}$",
            f"\\text{{{digits}}}",
            f"{digits}\\text{{ apples}}",
            f"\\mathbf{{{digits}}}",
            f"x = {digits}",
            digits.replace("-", "-0") if number < 0 else "0" + digits,
            f"\\frac{{{2 * number}}}{{2}}",
            f"{digits}e0",
        ]
    )


def fraction_forms(value: Fraction) -> list[str]:
    top, bottom = value.numerator, value.denominator
    sign = "-" if top < 0 else ""
    forms = [
        f"{top}/{bottom}",
        f"\\frac{{{top}}}{{{bottom}}}",
        f"{sign}\\dfrac{{{abs(top)}}}{{{bottom}}}",
        f"\\tfrac {{{3 * top}}} {{{3 * bottom}}}",
        f"\\left({sign}\\frac{{{abs(top)}}}{{{bottom}}}\\right)",
        f"{top} \\div {bottom}",
    ]
    whole, rest = divmod(abs(top), bottom)
    if whole and rest:
        forms += [f"{sign}{whole} {rest}/{bottom}", f"{sign}{whole}\\frac{{{rest}}}{{{bottom}}}"]
    return forms


@settings(deadline=None)
@given(integers, st.data(), surroundings)
def test_an_integer_in_any_form_is_right(number: int, data: st.DataObject, around: str) -> None:
    assert right(str(number), data.draw(integer_forms(number)), around)
    assert right(data.draw(integer_forms(number)), str(number), around)


@settings(deadline=None)
@given(integers, st.data())
def test_another_integer_in_any_form_is_wrong(number: int, data: st.DataObject) -> None:
    digits = str(number)
    place = data.draw(st.integers(0, len(digits) - 1))
    others = [
        number + 1,
        number - 1,
        -number,
        10 * number,
        int((digits[:place] + digits[place + 1 :].lstrip("-")).removesuffix("-") or "0"),
    ]
    other = data.draw(st.sampled_from(others))
    assume(other != number)
    assert not right(digits, data.draw(integer_forms(other)))
    assert not right(data.draw(integer_forms(number)), str(other))


@settings(max_examples=60, deadline=None)
@given(st.fractions(-50, 50, max_denominator=40), st.data())
def test_a_fraction_in_any_form_is_right_and_another_is_not(value: Fraction, data: st.DataObject) -> None:
    gold, answer = (data.draw(st.sampled_from(fraction_forms(value))) for _ in range(2))
    assert right(gold, answer)
    other = data.draw(st.sampled_from([-value, value + Fraction(1, 10**6), value + 1, 1 / value if value else value]))
    assume(other != value)
    assert not right(gold, data.draw(st.sampled_from(fraction_forms(other))))


@settings(deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(1, 6))
def test_a_decimal_equals_its_fraction_and_no_rounding_of_it(digits: int, places: int) -> None:
    value = Fraction(digits, 10**places)
    decimal = f"{'-' if digits < 0 else ''}{abs(digits) // 10**places}.{abs(digits) % 10**places:0{places}d}"
    assert right(f"{value.numerator}/{value.denominator}", decimal)
    assert right(decimal, f"\\frac{{{value.numerator}}}{{{value.denominator}}}")
    assert right(decimal, decimal + "00")
    assert not right(decimal, decimal + "1")


@settings(deadline=None)
@given(naturals, st.sampled_from([3, 7, 9, 11, 13]))
def test_a_rounded_decimal_is_not_the_fraction(top: int, bottom: int) -> None:
    assume(top % bottom)
    assert not right(f"\\frac{{{top}}}{{{bottom}}}", f"{top / bottom:.6f}")


@settings(deadline=None)
@given(st.integers(1, 10_000))
def test_percent_may_be_meant_either_way(number: int) -> None:
    decimal = f"{number / 100:.2f}"
    assert right(str(number), f"{number}\\%")
    assert right(decimal, f"{number}%")
    assert right(f"{number}\\%", decimal)
    assert not right(f"{number}\\%", f"{number + 1}\\%")
    assert not right(f"{number}\\%", f"{decimal}\\%")


@settings(deadline=None)
@given(st.integers(1, 999), st.integers(-30, 30))
def test_scientific_notation(digits: int, exponent: int) -> None:
    gold = f"{digits / 100:.2f} \\times 10^{{{exponent}}}"
    assert right(gold, f"{digits / 100:.2f}e{exponent}")
    assert right(gold, f"{digits / 10:.1f}\\cdot 10^{{{exponent - 1}}}")
    assert not right(gold, f"{digits / 100:.2f}e{exponent + 1}")


@settings(deadline=None)
@given(st.lists(integers, min_size=2, max_size=4))
def test_the_order_counts_in_tuples_and_not_in_sets(numbers: list[int]) -> None:
    shuffled = sorted(numbers)
    plain, other = (", ".join(map(str, each)) for each in (numbers, shuffled))
    assert right(f"({plain})", f"\\left({plain}\\right)")
    assert right(f"({plain})", plain)
    assert right(f"({plain})", f"({other})") == (numbers == shuffled)
    assert right(f"\\{{{plain}\\}}", f"\\left\\{{{other}\\right\\}}")
    assert right(plain, other)
    assert not right(f"({plain})", f"({plain}, 1)")
    assert not right(plain, "".join(map(str, numbers)))


@settings(deadline=None)
@given(st.integers(2, 9), st.data())
def test_a_base_is_part_of_the_number(base: int, data: st.DataObject) -> None:
    digits = data.draw(st.text("0123456789"[:base], min_size=2, max_size=6).filter(lambda text: text[0] != "0"))
    other = data.draw(st.integers(2, 36).filter(lambda number: number != base))
    assert right(f"{digits}_{base}", f"{digits}_{{{base}}}")
    assert right(f"{digits}_{base}", digits)
    assert right(str(int(digits, base)), f"{digits}_{base}")
    assert not right(f"{digits}_{base}", f"{digits}_{{{other}}}")


@settings(deadline=None)
@given(integers, integers, st.sampled_from(["()", "[]", "(]", "[)"]), st.data())
def test_an_interval_is_the_inequality_with_the_same_ends(low: int, width: int, ends: str, data: st.DataObject) -> None:
    high = low + abs(width) + 1
    interval = f"{ends[0]}{low},{high}{ends[1]}"
    signs = {"(": "<", "[": r" \leq ", ")": "<", "]": r" \le "}
    assert right(interval, f"{low}{signs[ends[0]]}x{signs[ends[1]]}{high}")
    other = data.draw(st.sampled_from(["()", "[]", "(]", "[)"]).filter(lambda each: each != ends))
    assert not right(interval, f"{other[0]}{low},{high}{other[1]}")
    assert not right(interval, f"{low - 1}{signs[ends[0]]}x{signs[ends[1]]}{high}")


@settings(max_examples=20, deadline=None)
@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9))
def test_polynomials_by_factors_and_by_powers(first: int, second: int, scale: int) -> None:
    expanded = f"{scale}x^2{scale * (first + second):+d}x{scale * first * second:+d}"
    assert right(expanded, f"{scale}(x{first:+d})(x{second:+d})")
    assert not right(expanded, f"{scale}(x{first:+d})(x{second + 1:+d})")


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 30), st.integers(2, 9), integers)
def test_surds(under: int, outside: int, added: int) -> None:
    gold = f"{added}+{outside}\\sqrt{{{under}}}"
    assert right(gold, f"{outside}√{under} + {added}")
    assert right(gold, f"\\sqrt{{{outside * outside * under}}}{added:+d}")
    assert not right(gold, f"{added}-{outside}\\sqrt{{{under}}}")
    assert not right(gold, f"{added}+{outside}\\sqrt{{{under + 1}}}")


@settings(max_examples=20, deadline=None)
@given(st.integers(50, 3000))
def test_tiny_numbers_are_not_equal_because_both_are_small(exponent: int) -> None:
    gold = f"\\frac{{1}}{{2^{{{exponent}}}}}"
    assert right(gold, f"2^{{-{exponent}}}")
    assert not right(gold, f"2^{{-{exponent + 1}}}")
    assert not right(gold, "0")


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789+-*/^_{}()[]=<>,.;:!%$&|\\ xyabcdefghinopqrstu\"'√½²√π∞−", max_size=12))
def test_no_garbage_raises_or_is_right(text: str) -> None:
    verdict = grade({"gold": "8675309", "extractor": "whole"}, text)
    assert verdict.score == 0.0
