"""Faulty rows: each is reported once, with its row, and left out or kept as the table says."""

import json
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gppo_megatron.config.schema import FileData
from gppo_megatron.data.files.adapters import Problem
from gppo_megatron.data.files.faults import FAULTS, Finding, Report
from gppo_megatron.data.files.overlap import TextIndex
from gppo_megatron.data.files.readers import Origin
from gppo_megatron.data.files.sets import SameAnswer, read_sets
from gppo_megatron.data.files.sieve import Checks, Kept, ReadRow, Sieve, unwrapped
from gppo_megatron.data.files.templates import TEMPLATES, Writer
from tests.unit.code_points import CodePoints

DATA = Path(__file__).parents[1] / "data" / "files"


def silent(line: str) -> None:
    pass


def labelled() -> dict[str, int]:
    """Each fault -> the row of the file that has it, as the row itself says."""
    lines = (DATA / "faults.jsonl").read_text(encoding="utf-8").splitlines()
    labels = [json.loads(line)["extra_info"]["fault"] for line in lines]
    assert len(set(labels) - {""}) == len([label for label in labels if label])
    return {label: number for number, label in enumerate(labels, 1) if label}


def test_one_row_of_each_fault_gives_one_line_each() -> None:
    expected = labelled()
    config = FileData(
        path=str(DATA / "faults.jsonl"),
        adapter="eurus2_math",
        evaluation=str(DATA / "evaluation.jsonl"),
        max_prompt_tokens=400,
    )
    sets = read_sets(config, Writer(TEMPLATES["boxed_user"], False, CodePoints()), silent)
    assert sets.evaluation is not None
    assert str(sets.evaluation.report).endswith("evaluation.jsonl: 1 rows, 1 kept, 0 left out")
    report = sets.train.report
    assert {fault: tally.origin.number for fault, tally in report.tallies.items()} == expected
    assert {fault for fault, tally in report.tallies.items() if tally.count != 1} == {"conflicting_golds"}
    assert report.count("conflicting_golds") == 2
    # Only OlympiadBench has tolerances.
    assert set(FAULTS) - set(expected) == {"unused_tolerance"}
    headline, *lines = str(report).splitlines()
    assert headline.endswith("faults.jsonl: 26 rows, 8 kept, 18 left out")
    assert [line.split()[0] for line in lines] == [fault for fault in FAULTS if fault in expected]
    kept = {problem.origin.number for problem in sets.train.problems}
    assert kept == {1, 2, *(row for fault, row in expected.items() if not FAULTS[fault])}


def rows(*problems: Problem) -> Iterator[ReadRow]:
    for number, problem in enumerate(problems, 1):
        yield ReadRow(Origin(Path("a.jsonl"), number), problem)


def checks(**changes: Any) -> Checks:
    return Checks(**{"self_check": lambda gold: None, "write": None, "max_prompt_tokens": 100} | changes)


def sifted(problems: Sequence[Problem], **changes: Any) -> tuple[list[Kept], Report]:
    sieve = Sieve("a.jsonl", checks(**changes))
    return sieve.sift(rows(*problems)), sieve.report


def numbers(kept: list[Kept]) -> list[int]:
    return [problem.origin.number for problem in kept]


def test_the_first_of_equal_texts_is_kept() -> None:
    problems = [Problem("What is 1+1?", ("2",)), Problem(" What  is\n1+1? ", ("2",)), Problem("What is 1+2?", ("3",))]
    kept, report = sifted(problems)
    assert numbers(kept) == [1, 3]
    assert (report.rows, report.kept, report.dropped, report.count("duplicate")) == (3, 2, 1, 1)


def test_repeats_may_be_allowed() -> None:
    kept, report = sifted([Problem("What is 1+1?", ("2",))] * 3, repeats=True)
    assert (numbers(kept), report.tallies) == ([1, 2, 3], {})


def test_all_rows_of_a_contradicted_problem_are_left_out() -> None:
    golds = ["2", "2", "3", "2"]
    problems = [Problem("What is 1+1?", (gold,)) for gold in golds]
    kept, report = sifted([*problems, Problem("What is 1+2?", ("3",))])
    assert numbers(kept) == [5]
    assert (report.dropped, report.count("duplicate"), report.count("conflicting_golds")) == (4, 1, 3)
    assert report.tallies["conflicting_golds"].origin.number == 3
    kept, report = sifted(problems, repeats=True)
    assert (kept, report.count("conflicting_golds")) == ([], 4)


def test_a_missing_gold_contradicts_none() -> None:
    kept, report = sifted([Problem("What is 1+1?", (gold,)) for gold in ("nan", "2", "", "$2$")])
    assert numbers(kept) == [2]
    assert {fault: tally.count for fault, tally in report.tallies.items()} == {"missing_gold": 2, "duplicate": 1}


def test_golds_that_are_written_in_two_ways_agree(tmp_path: Path) -> None:
    golds = ["0.5", "\\frac{1}{2}", "50\\%", "\\frac{2}{4}"]
    lines = [json.dumps({"prompt": "How much is half?", "answer": gold}) for gold in golds]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    report = read_sets(FileData(path=str(tmp_path / "a.jsonl")), None, silent).train.report
    assert {fault: tally.count for fault, tally in report.tallies.items()} == {"duplicate": 3}
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, lines[0].replace("0.5", "0.51")]))
    report = read_sets(FileData(path=str(tmp_path / "a.jsonl")), None, silent).train.report
    assert report.count("conflicting_golds") == 2


def test_golds_too_hard_to_compare_do_not_hold_up_the_reading() -> None:
    pair = r"\int_0^1 x^{2} dx", r"\frac{1}{3}"
    with SameAnswer(timeout_seconds=120.0) as same:
        assert same(*pair)
    with SameAnswer(timeout_seconds=0.001) as same:
        assert not same(*pair)
        assert not same(*pair)


def test_a_gold_the_verifier_refuses_is_left_out_with_its_reason() -> None:
    asked: list[str] = []

    def self_check(gold: str) -> str | None:
        asked.append(gold)
        return "no number" if gold == "x" else None

    problems = [Problem(f"What is {place}?", (gold,)) for place, gold in enumerate(["x", "1", "x", "1"])]
    kept, report = sifted(problems, self_check=self_check)
    assert numbers(kept) == [2, 4]
    assert report.count("unverifiable_gold") == 2
    assert report.tallies["unverifiable_gold"].detail == "the answer is 'x': no number"
    assert asked == ["x", "1"]


def test_each_of_several_golds_is_checked() -> None:
    kept, report = sifted([Problem("Half?", ("1/2", "")), Problem("Third?", ("1/3", "2/6"))])
    assert (numbers(kept), report.count("missing_gold")) == ([2], 1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a\ufffdb", "broken_unicode"),
        ("\ud83d?", "broken_unicode"),
        ("a\x00b", "broken_unicode"),
        ("$\x0crac{1}{2}$", "swallowed_latex"),
        ("$\x08oxed{2}$", "swallowed_latex"),
        ("$\text{ cm}$", "swallowed_latex"),
        ("$2\times 3$", "swallowed_latex"),
        ("$\theta$", "swallowed_latex"),
        ("$\\left(1\right)$", "swallowed_latex"),
        ("page\x0cbreak", "invisible_characters"),
        ("a\u200bb", "invisible_characters"),
        ("a\u202eb", "invisible_characters"),
        ("\ufeffWhat?", "invisible_characters"),
        ("a\r\nb", "carriage_returns"),
        ("see ![the figure](a.png)", "missing_image"),
        ("\\includegraphics{a}", "missing_image"),
        ("[asy]draw();[/asy]", "asy_figure"),
        ("What? Put your final answer within \\boxed{}.", "template_leftover"),
        ("<|im_start|>user\nWhat?", "template_leftover"),
    ],
)
def test_faults_of_a_text(text: str, fault: str) -> None:
    _, report = sifted([Problem(text, ("1",))])
    assert {name: tally.count for name, tally in report.tallies.items()} == {fault: 1}


@pytest.mark.parametrize(
    "text",
    [
        "a\tb\n\tif x:\n\t\treturn",
        "$\\frac{1}{2} \\times \\theta$ caf\u00e9 \u4f60\u597d \U0001f600 \u221a2",
        "Tom pays $5 and <b>wins</b>",
        "Which numbers can be boxed in?",
    ],
)
def test_a_sound_text_has_no_fault(text: str) -> None:
    assert sifted([Problem(text, ("1",))])[1].tallies == {}


def test_without_a_template_the_text_may_bring_its_own() -> None:
    kept, report = sifted([Problem("What? Put it within \\boxed{}.", ("1",))], in_template=False)
    assert (len(kept), report.tallies) == (1, {})


@pytest.mark.parametrize(
    ("gold", "fault", "dropped"),
    [
        ("", "missing_gold", True),
        ("NaN", "missing_gold", True),
        ("[]", "missing_gold", True),
        ("None", "missing_gold", True),
        ("Proof.", "missing_gold", True),
        ("see solution", "missing_gold", True),
        ("$1$ or $2$", "marked_up_gold", True),
        ("It is \\boxed{3}", "marked_up_gold", True),
        ("Answer: 3", "marked_up_gold", True),
        ("#### 3", "marked_up_gold", True),
        ("\x0crac{1}{2}", "swallowed_latex", True),
        ("\text{Evelyn}", "swallowed_latex", True),
        ("\rho", "swallowed_latex", True),
        ("3\ufffd", "broken_unicode", True),
        ("(B)", "guessable_gold", False),
        ("\\text{Yes}", "guessable_gold", False),
        ("$\\frac{1}{2}$", "wrapped_gold", False),
        ("\\boxed{\\frac{\\sqrt{3}}{2}}", "wrapped_gold", False),
    ],
)
def test_faults_of_a_gold(gold: str, fault: str, dropped: bool) -> None:
    kept, report = sifted([Problem("What?", (gold,))])
    assert (list(report.tallies), kept == []) == ([fault], dropped)


@pytest.mark.parametrize("gold", ["5", "-7", "1,000", "\\$5", "p - q", "(0,1)", "\\text{Evelyn}", "90^\\circ", "0"])
def test_a_sound_gold_has_no_fault(gold: str) -> None:
    assert sifted([Problem("What?", (gold,))])[1].tallies == {}


@pytest.mark.parametrize(
    ("gold", "bare"),
    [
        ("$\\frac{1}{2}$", "\\frac{1}{2}"),
        ("$$ x $$", "x"),
        ("\\boxed{\\frac{\\sqrt{3}}{2}}", "\\frac{\\sqrt{3}}{2}"),
        ("$1$, $2$", "$1$, $2$"),
        ("\\boxed{1}, \\boxed{2}", "\\boxed{1}, \\boxed{2}"),
        ("\\$5", "\\$5"),
    ],
)
def test_what_is_taken_off_a_gold(gold: str, bare: str) -> None:
    assert unwrapped(gold) == bare


def test_kept_text_and_golds_are_clean() -> None:
    kept, _ = sifted([Problem(" a\r\nb \n", (" $7$ ",))])
    assert kept[0].problem == Problem("a\nb", ("7",))


def test_length_and_characters_are_the_tokenizer_s() -> None:
    writer = Writer(TEMPLATES["none"], False, CodePoints())
    problems = [
        Problem("1" * 100, ("1",)),
        Problem("2" * 101, ("2",)),
        Problem("\u2603", ("3",)),
        Problem("4", ("\u2603",)),
    ]
    kept, report = sifted(problems, write=writer.write)
    assert numbers(kept) == [1]
    assert {fault: tally.count for fault, tally in report.tallies.items()} == {"long_prompt": 1, "unwritable": 2}
    assert report.tallies["long_prompt"].detail == "101 tokens, and 100 are the limit"
    assert kept[0].written is not None
    assert len(kept[0].written.prompt_ids) == 100


WORDS = [f"word{place}" for place in range(40)]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (WORDS[:20], "overlap"),
        ([word.upper() for word in WORDS[:20]], "near_overlap"),
        (["Before:", *WORDS[5:18], "after"], "near_overlap"),
        (["Before:", *WORDS[5:17], "after"], None),
        (WORDS[12:40], None),
    ],
)
def test_overlap_with_the_evaluation_set(words: list[str], fault: str | None) -> None:
    index = TextIndex()
    index.add("  ".join(WORDS[:20]), "e.jsonl row 7")
    kept, report = sifted([Problem(" ".join(words), ("1",))], evaluation=index)
    assert list(report.tallies) == ([fault] if fault else [])
    assert (kept == []) == (fault == "overlap")
    assert all("e.jsonl row 7" in tally.detail for tally in report.tallies.values())


@given(
    st.lists(
        st.builds(
            Problem,
            text=st.sampled_from(["a", "b", "c", "d\ufffd", "<image>", "see [asy]"]),
            golds=st.sampled_from([("1",), ("2",), ("nan",), ("$1$",)]),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_every_row_is_kept_or_left_out_for_a_reason(problems: list[Problem], repeats: bool) -> None:
    kept, report = sifted(problems, repeats=repeats)
    assert report.rows == len(problems)
    assert report.kept == len(kept)
    reasons = sum(tally.count for fault, tally in report.tallies.items() if FAULTS[fault])
    assert report.dropped <= reasons
    texts = [problem.problem.text for problem in kept]
    assert repeats or len(texts) == len(set(texts))


def test_an_unknown_fault_cannot_be_reported() -> None:
    with pytest.raises(ValueError, match="no such fault: 'typo'"):
        Finding("typo", "")


def test_the_documentation_lists_every_fault_and_its_fate() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in lines if line.startswith("| `")]
    fates = {fault: "left out" if drops else "kept" for fault, drops in FAULTS.items()}
    assert {name: fate for name, fate in cells if name in FAULTS} == fates


def test_duplicates_take_no_memory(tmp_path: Path) -> None:
    """10,000 rows of 2 kB, 100 of them different: what is kept is 0.2 MB of the 20 that are read."""
    texts = [f"{place % 100:04} ".rjust(2000, "x") for place in range(10_000)]
    pq.write_table(pa.table({"prompt": texts, "answer": ["1"] * len(texts)}), tmp_path / "a.parquet")
    del texts
    tracemalloc.start()
    try:
        sets = read_sets(FileData(path=str(tmp_path / "a.parquet")), None, silent)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(sets.train.problems), sets.train.report.count("duplicate")) == (100, 9_900)
    assert peak < 8e6
