"""Evaluation of a checkpoint: the statistics by hand, and that stopping half-way changes nothing."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gppo_verifiers.types import Status, Task, Verdict
from hypothesis import given
from hypothesis import strategies as st

from gppo_megatron.errors import ConfigError, DataError
from gppo_megatron.evaluate.answers import ANSWERS, AnswerFile
from gppo_megatron.evaluate.checkpoint import Examination, table
from gppo_megatron.evaluate.statistics import average, pass_at, pass_chance, wilson
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.types import Group, Prompt, Trajectory


@given(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.integers(1, n)))
)
def test_pass_chance_is_the_share_of_draws_with_a_right_answer(case: tuple[list[bool], int]) -> None:
    right, k = case
    draws = list(itertools.combinations(right, k))
    assert pass_chance(len(right), sum(right), k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    """Over all outcomes of 4 answers that are each right with chance .3, the mean estimate is 1 - .7 ** 2."""
    expected = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=4):
        chance = math.prod(0.3 if score else 0.7 for score in outcome)
        expected += chance * pass_at(2, [outcome]).value
    assert expected == pytest.approx(1 - 0.7**2)


def test_averages_keep_the_denominators_fixed_when_they_were_asked_for() -> None:
    estimate = average([(1.0, None, 0.0, 0.0), (1.0, 1.0, None, None)])
    assert (estimate.lowest, estimate.highest) == (3 / 8, 6 / 8)
    assert estimate.value == 3 / 8
    passed = pass_at(4, [(1.0, None, 0.0, 0.0), (0.0, 0.0, None, 0.0)])
    assert (passed.lowest, passed.highest) == (0.5, 1.0)


def test_wilson_interval_of_known_cases() -> None:
    """10 coin flips, 5 heads: the textbook interval; none and all of 10 do not give an interval of width 0."""
    flips = [1.0, 0.0] * 5
    inflated = 10 * 9 / 10  # the sample variance counts 9 free values
    square = 1.959963984540054**2 / inflated
    half = math.sqrt(square * (0.25 + square / 4)) / (1 + square)
    assert wilson(flips) == pytest.approx((0.5 - half, 0.5 + half))
    assert wilson([1.0] * 10) == pytest.approx((0.722467, 1.0), abs=1e-5)
    assert wilson([0.0] * 10) == pytest.approx((0.0, 0.277533), abs=1e-5)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random = np.random.Generator(np.random.Philox(key=1))
    covered = 0
    for _ in range(400):
        chances = random.beta(2, 3, size=60)
        low, high = wilson(list(random.binomial(4, chances) / 4))
        covered += low <= 0.4 <= high
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize("scores", [[], [()], [(1.0,), ()]])
def test_nothing_asked_is_no_average(scores: list[tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        average(scores)


def test_pass_at_k_needs_k_answers() -> None:
    with pytest.raises(ValueError, match="at least 3 answers"):
        pass_at(3, [(1.0, 0.0, 1.0), (1.0, 0.0)])


class KilledError(Exception):
    """Stands for a kill in the middle of an examination."""


@dataclass
class FakeCollector:
    """Three answers a prompt that depend on its place; dies after `chunks` calls."""

    chunks: float = math.inf

    def collect(self, prompts: Sequence[Prompt], places: Sequence[int], step: int, metrics: StepMetrics) -> list[Group]:
        if self.chunks <= 0:
            raise KilledError
        self.chunks -= 1
        return [
            Group(prompt, tuple(answer(place, i) for i in range(3)))
            for place, prompt in zip(places, prompts, strict=True)
        ]


def answer(place: int, index: int) -> Trajectory:
    verdict = Verdict(None, Status.TIMEOUT) if place == 5 else Verdict(float((place + index) % 2), Status.GRADED)
    return Trajectory(
        token_ids=np.array([9, place, index]),
        sampler_logprobs=np.zeros(3, np.float32),
        trainable=np.array([False, True, True]),
        policy_versions=np.array([-1, 0, 0]),
        finish="stop" if place else "length",
        verdict=verdict,
    )


PROMPTS = [Prompt(f"p{place}", (9,), Task("none")) for place in range(10)]
SETTINGS = {"model": "m", "samples": 3}


def examination(folder: Path, collector: FakeCollector, settings: dict[str, object] | None = None) -> Examination:
    file = AnswerFile(folder, settings or SETTINGS)
    return Examination(collector, PROMPTS, lambda ids: " ".join(map(str, ids)), file, lambda line: None, chunk=3)


def test_a_stopped_examination_goes_on_to_the_same_table(tmp_path: Path) -> None:
    expected = examination(tmp_path / "whole", FakeCollector()).run()
    with pytest.raises(KilledError):
        examination(tmp_path / "stopped", FakeCollector(chunks=2)).run()
    with (tmp_path / "stopped" / ANSWERS).open("a") as file:
        file.write('{"place": 6, "id": "p6", "answ')
    assert examination(tmp_path / "stopped", FakeCollector()).run() == expected
    whole, stopped = ((tmp_path / name / ANSWERS).read_text() for name in ("whole", "stopped"))
    assert whole == stopped
    assert json.loads(whole.splitlines()[4])["answers"] == ["4 0", "4 1", "4 2"]
    assert table(expected) == table(examination(tmp_path / "stopped", FakeCollector(chunks=0)).run())


def test_the_table(tmp_path: Path) -> None:
    text = table(examination(tmp_path / "whole", FakeCollector()).run())
    lines = text.splitlines()
    assert lines[0] == "10 problems x 3 answers; 90.0% ended by themselves"
    # even places have one right answer of three, odd ones two, place 5 none that is known
    assert lines[1].startswith(f"avg@3     {(5 * 1 + 4 * 2) / 30:.4f}  95 % interval ")
    assert lines[1].endswith(f"range {13 / 30:.4f} to {16 / 30:.4f}")
    assert [line.split()[0] for line in lines[2:5]] == ["pass@1", "pass@2", "pass@3"]
    assert lines[5].startswith("3 answers have no verdict")


def test_answers_under_other_settings_are_not_mixed(tmp_path: Path) -> None:
    examination(tmp_path / "a", FakeCollector()).run()
    with pytest.raises(ConfigError, match=r"other settings \(samples, seed differ\)"):
        examination(tmp_path / "a", FakeCollector(), {"model": "m", "samples": 4, "seed": 2})


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    examination(tmp_path / "a", FakeCollector()).run()
    path = tmp_path / "a" / ANSWERS
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(DataError, match="damaged"):
        examination(tmp_path / "a", FakeCollector()).run()


def test_a_place_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("text")
    with pytest.raises(ConfigError, match="out cannot be made: File exists; choose another --out"):
        AnswerFile(tmp_path / "out", SETTINGS)
