"""Judges answers to reasoning-gym tasks, right (1) or wrong (0), with their own verifiers where those can be trusted.

A payload holds `task` (registered name), `entry` (as drawn, made of JSON values), `threshold` (score from which an
answer is right) and optionally `options` (arguments of the dataset that the entry was drawn from).
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym

from gppo_verifiers.reasoning_faults import FAULTS, NO_FAULT, REFERENCES, REFUSED, is_readable
from gppo_verifiers.types import Status, Verdict

MAX_CHARACTERS = 20_000
ROUNDING = 1e-9
GARBAGE = ("zzz", "", "nan", "[]", "z" * 2000)


def grade(payload: Mapping[str, Any], text: str) -> Verdict:
    """The verdict on `text`; only an answer that scores the threshold or more is right.

    Raises whatever reasoning-gym's verifier raises, and ValueError for a score that is no number in [0, 1].
    """
    task, entry = payload["task"], payload["entry"]
    if len(text) > MAX_CHARACTERS:
        return Verdict(0.0, Status.UNPARSABLE, f"longer than {MAX_CHARACTERS} characters")
    if not is_readable(task, text):
        return Verdict(0.0, Status.UNPARSABLE, f"not written as an answer to {task}")
    fault = FAULTS.get(task, NO_FAULT)
    if fault.right:
        return Verdict(float(fault.right(text, entry)), Status.GRADED)
    dataset = _dataset(task, json.dumps(payload.get("options", {}), sort_keys=True))
    try:
        score = float(dataset.score_answer(text, entry))
    except fault.raises as error:
        return Verdict(0.0, Status.UNPARSABLE, f"{type(error).__name__}: {error}")
    if not 0.0 <= score <= 1.0 + ROUNDING:
        raise ValueError(f"{task} gave the score {score}")
    return Verdict(float(score >= payload["threshold"] - ROUNDING), Status.GRADED)


def reference_answer(task: str, entry: Mapping[str, Any]) -> str | None:
    """A right answer to `entry`; None where reasoning-gym keeps none."""
    if task in REFERENCES:
        return REFERENCES[task](entry)
    answer: str | None = entry["answer"]
    return answer


def probe(payloads: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the verifier of these problems: a reference answer must score 1, garbage must score 0."""
    problems = []
    for payload in payloads:
        task = payload["task"]
        if task in REFUSED:
            return [f"{task}: {REFUSED[task]}"]
        reference = reference_answer(task, payload["entry"])
        expected = {} if reference is None else {reference: 1.0}
        for text, score in (dict.fromkeys(GARBAGE, 0.0) | expected).items():
            try:
                given = grade(payload, text).score
            except Exception as error:  # noqa: BLE001 - a verifier can raise anything; it is reported, not hidden
                problems.append(f"{task}: the verifier raises {type(error).__name__} on {text[:40]!r}: {error}")
            else:
                if given != score:
                    problems.append(f"{task}: {text[:40]!r} scores {given:g} and should score {score:g}")
    return list(dict.fromkeys(problems))


@lru_cache(maxsize=64)
def _dataset(task: str, options: str) -> Any:
    """The dataset whose verifier judges; some verifiers read the options their entries were drawn with."""
    return reasoning_gym.create_dataset(task, **json.loads(options))
