"""The verdict on every listed pair of a gold answer and a response; what must be read, refused or reported."""

import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest
from gppo_verifiers.math.extract import EXTRACTORS
from gppo_verifiers.math.grading import grade, is_exact, self_check
from gppo_verifiers.math.symbolic import UnreadableError, grader_version, read
from gppo_verifiers.types import Status, Verdict

DATA = Path(__file__).parent.parent / "data"
CASES = json.loads((DATA / "math_cases.json").read_text())
GSM8K = [json.loads(line) for line in (DATA / "gsm8k_rows.jsonl").read_text().splitlines()]
GIVEN_UP: dict[tuple[str, str], str] = {}
"""Cases (gold, answer) with a verdict known to be wrong, and why."""


def boxed(gold: Any, content: str, **options: Any) -> Verdict:
    return grade({"gold": gold, "extractor": "boxed", **options}, f"\\boxed{{{content}}}")


def name_of(case: dict[str, Any]) -> str:
    return f"{case['kind']}: {case['gold'][:20]} ? {case['answer'][:30]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_case(case: dict[str, Any]) -> None:
    verdict = grade({"gold": case["gold"], "extractor": case["extractor"]}, case["answer"])
    expected = case["right"] != ((case["gold"], case["answer"]) in GIVEN_UP)
    assert verdict.score == float(expected), verdict


def test_every_gold_answer_of_the_cases_grades_itself_as_right() -> None:
    assert {case["gold"]: reason for case in CASES if (reason := self_check(case["gold"]))} == {}


@pytest.mark.parametrize(
    ("extractor", "text", "found"),
    [
        ("boxed", r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{a \fbox{2}}", "2"),
        ("boxed", r"\boxed{\boxed{5}}", "5"),
        ("boxed", r"$\boxed 2$ units", "2"),
        ("boxed", r"\fbox {3}", "3"),
        ("boxed", r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        ("boxed", r"\boxed{1} and \boxed{}", None),
        ("boxed", r"\boxed{1} and \boxed{2", None),
        ("boxed", "42", None),
        ("boxed", r"<think>\boxed{1}</think>\boxed{2}", "2"),
        ("boxed", r"<think>\boxed{1}", None),
        ("boxed", r"thinking \boxed{1}</think> no box", None),
        ("boxed", r"\boxedx{1}", None),
        ("answer_line", "Answer: 3\nAnswer: 4", "4"),
        ("answer_line", "**Answer:** $4$", "$4$"),
        ("answer_line", "Answer: \\boxed{4}\nthanks", "4"),
        ("answer_line", "答案：6", "6"),
        ("answer_line", "Answer: 4" + " " * 292, None),
        ("answer_line", "Answer:", None),
        ("answer_line", r"\boxed{4}", None),
        ("answer_tags", "<think><answer>1</answer></think><answer> 2 </answer>", "2"),
        ("answer_tags", "<answer>1</answer><answer>2", None),
        ("answer_tags", "1</answer>", None),
        ("hash_line", "#### 7\n#### 72 \nbye", "72"),
        ("hash_line", "##### 72", None),
        ("whole", " 72\n", "72"),
        ("whole", "<think>72", None),
    ],
)
def test_extraction(extractor: str, text: str, found: str | None) -> None:
    assert EXTRACTORS[extractor].find(text) == found


@pytest.mark.parametrize("name", EXTRACTORS)
def test_an_extractor_finds_what_it_writes(name: str) -> None:
    assert EXTRACTORS[name].find(EXTRACTORS[name].write(r"\frac{1}{2}")) == r"\frac{1}{2}"
    assert self_check(r"\frac{1}{2}", name) is None


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"10\text{ cm}", "10", True),
        ("10", "10 cm", True),
        (r"10\text{ cm}", "10 mm", False),
        ("5", r"5 \text{ or more}", False),
        ("5", r"\text{not }5", False),
        ("5", "3=5", False),
        ("5", "2+3=5", True),
        ("5", "==", False),
        ("5", r"5\text{ is wrong}", False),
        ("2", "2xy", False),
        ("12", "$1$$2$", False),
        ("x=5", "y=5", False),
        ("y=2x+3", "2x-y+3=0", True),
        ("x", "x'", False),
        ("x", r"x\ldots", False),
        ("x", r"\frac{x}{", False),
        ("6:00", "5:00", False),
        (r"6:00\text{ PM}", "6:00 AM", False),
        (r"\text{June 20}", "June 21", False),
        ("3", "three", False),
        (r"\frac{22}{3}", "4 10/3", False),
        (r"0.\overline{3}", r"\frac{1}{3}", True),
        (r"0.\overline{3}", "0.3", False),
        ("100,200", "(100,200)", True),
        (r"(-\infty,-1)\cup(1,\infty)", r"x<-1 \text{ or } x>1", True),
        (r"x\ge 3", "x>3", False),
        (r"x\ge 3", r"3 \leq x", True),
        (r"2^3\cdot 3^2", "72", True),
        (r"\left(\frac{1}{2}\right)^{2005}", "2^{-2005}", True),
        (r"\left(\frac{1}{2}\right)^{2005}", "2^{-2006}", False),
        ("(10^{-7},1)", r"(2\times10^{-7},1)", False),
        (r"x+10^{-9}", r"x+2\cdot 10^{-9}", False),
        (r"\tan 45^\circ", "1", True),
        ("6-5i", "-5i+6", True),
        ("6-5i", "6+5i", False),
        ("(x+y+z)^{99}", "(x+y+z)^{98}", False),
        (r"\frac{1}{3}", r"\int_0^1 x^2 dx", True),
        ("a_{12}", "10", False),
        ("1011_2", "1011_3", False),
    ],
)
def test_pair(gold: str, answer: str, *, right: bool) -> None:
    assert boxed(gold, answer).score == float(right)


@pytest.mark.parametrize(
    ("gold", "reason"),
    [
        ("", "empty"),
        ("$$", "holds nothing"),
        (r"\frac{1}{", "cannot be read"),
        (r"\sum_{k=0}^n", "cannot be read"),
        (r"x \text{ is prime}", "cannot be read"),
        (r"13824 \notin A", "cannot be read"),
        ("10^{10^{10}}", "tower"),
        ("x+" * 251 + "1", "longer than 500"),
    ],
)
def test_a_gold_answer_that_cannot_be_read_is_never_rewarded(gold: str, reason: str) -> None:
    assert reason in str(self_check(gold))
    with pytest.raises(ValueError, match=reason):
        boxed(gold, gold)


def test_a_formula_of_which_a_part_is_dropped_is_not_read() -> None:
    with pytest.raises(UnreadableError, match="n, p, x is lost"):
        read("P(X_n=4)=5/8")


def test_any_of_several_gold_answers_is_right_and_all_must_be_readable() -> None:
    assert boxed(["3", "4"], "4").score == 1.0
    assert boxed(["3", "4"], "5").score == 0.0
    with pytest.raises(ValueError, match="cannot be read"):
        boxed(["3", r"\frac{"], "3")
    with pytest.raises(ValueError, match="no gold answer"):
        boxed([], "3")


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        ("(" * 300 + "1" + ")" * 300, "longer than"),
        ("(x+" * 100 + "1" + ")" * 100, "nested"),
        ("1+" * 400 + "1", "longer than"),
        ("9999999!", "factorial"),
        ("((9!)!)!", "factorial"),
        ("10^{10^{10}}", "exponents"),
        ("(10^{999})^{999}", "exponents"),
        (r"\sum_{k=1}^{10^{9}} \frac{1}{k!}", "terms"),
        (r"\sum_{k=1}^{99999} \frac{1}{k!}", "terms"),
        (r"\binom{99999999}{5}", "factorial"),
        ("so it goes on", "words"),
        ("", "no answer"),
    ],
)
def test_an_answer_that_is_refused_scores_0(content: str, detail: str) -> None:
    verdict = boxed("5", content)
    assert (verdict.score, verdict.status) == (0.0, Status.UNPARSABLE)
    assert detail in verdict.detail


def test_tolerance_is_relative_and_off_by_default() -> None:
    assert boxed("3.14", "3.141").score == 0.0
    assert boxed("3.14", "3.141", tolerance=1e-3).score == 1.0
    assert boxed("3.14", r"\pi", tolerance=1e-3).score == 1.0
    assert boxed("6.63e-34", "6.7e-34", tolerance=1e-2).score == 0.0
    assert boxed("6.63e-34", "6.6e-34", tolerance=1e-2).score == 1.0


@pytest.mark.parametrize(
    ("gold", "exact"),
    [
        ("72", True),
        (r"\frac{1}{2}", True),
        ("1,000", True),
        (r"10\text{ cm}", True),
        (r"\sqrt{2}", False),
        ("x", False),
    ],
)
def test_is_exact(gold: str, *, exact: bool) -> None:
    assert is_exact(gold) == exact


@pytest.mark.parametrize("row", GSM8K, ids=lambda row: row["answer"][-12:])
def test_gsm8k_rows(row: dict[str, str]) -> None:
    gold = row["answer"].rsplit("####", 1)[1].strip()
    assert is_exact(gold)
    assert self_check(gold) is None
    assert grade({"gold": gold, "extractor": "hash_line"}, row["answer"]).score == 1.0
    assert boxed(gold, str(float(gold.replace(",", "")) + 1)).score == 0.0


def test_integers_are_checked_fast_enough_to_check_whole_data_sets() -> None:
    start = process_time()
    assert not any(self_check(str(number)) for number in range(10_000_000, 10_004_000))
    assert process_time() - start < 8.0


def test_the_grader_names_its_versions() -> None:
    assert grader_version() == "math-verify=0.9.0 latex2sympy2_extended=1.11.0 sympy=1.14.0"
