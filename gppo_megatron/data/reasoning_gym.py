"""Problems from reasoning-gym: drawn, written as prompts, and split so that evaluation sees only unseen text."""

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import reasoning_gym
from gppo_verifiers.reasoning import grade, probe, reference_answer
from gppo_verifiers.reasoning_faults import REFUSED
from gppo_verifiers.types import Task
from reasoning_gym.factory import DATASETS

from gppo_megatron.config.schema import ReasoningGymData
from gppo_megatron.data.render import Tokenizer, answer_ids, prompt_ids
from gppo_megatron.data.split import Problems, is_held_out
from gppo_megatron.errors import DataError
from gppo_megatron.types import Prompt

PROBED = 32
"""Problems on which the verifier is tried before the run."""


@dataclass(frozen=True)
class _Problem:
    """text: the written prompt. reference: a right answer, None where none is known."""

    text: str
    payload: Mapping[str, Any]
    reference: str | None


def draw_problems(config: ReasoningGymData, tokenizer: Tokenizer) -> Problems:
    """Draw, write and split `config.pool` problems; the same configuration gives the same problems.

    Raises DataError for an unknown task, options or prompt that do not fit it, text the tokenizer cannot write,
    a verifier that cannot be trusted, and a split that leaves one side empty.
    """
    drawn = _draw(config)
    problems = _distinct(config, drawn)
    faults = probe([problem.payload for problem in problems[:PROBED]])
    if faults:
        raise DataError(f"data.task {config.task} cannot be trusted:\n  " + "\n  ".join(faults[:5]))
    train = [problem for problem in problems if not is_held_out(problem.text, config.holdout)]
    heldout = [problem for problem in problems if is_held_out(problem.text, config.holdout)]
    if not train or (config.holdout > 0 and not heldout):
        raise DataError(
            f"{len(problems)} distinct problems split into {len(train)} to train on and {len(heldout)} held out; "
            "raise data.pool, change data.holdout, or widen data.options"
        )
    return Problems(
        train=tuple(_prompt(problem, config, tokenizer) for problem in train),
        heldout=tuple(_prompt(problem, config, tokenizer) for problem in heldout),
        drawn=len(drawn),
        duplicates=len(drawn) - len(problems),
    )


def _draw(config: ReasoningGymData) -> list[_Problem]:
    if config.task not in DATASETS:
        nearest = difflib.get_close_matches(config.task, DATASETS, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(nearest)}" if nearest else "see docs/data.md for the names"
        raise DataError(f"data.task {config.task!r} is not a reasoning-gym task; {hint}")
    if config.task in REFUSED:
        raise DataError(f"data.task {config.task} cannot be used: {REFUSED[config.task]}")
    reserved = sorted({"seed", "size"} & set(config.options))
    if reserved:
        raise DataError(f"data.options cannot set {' or '.join(reserved)}; data.pool is how many problems are drawn")
    try:
        # As the workers will see them: tuples become lists on their way through JSON.
        options = json.loads(json.dumps(dict(config.options)))
        dataset = reasoning_gym.create_dataset(config.task, seed=_seed(config), size=config.pool, **options)
        entries = [dataset[place] for place in range(config.pool)]
    except (TypeError, ValueError, AssertionError, IndexError, KeyError) as error:
        known = ", ".join(sorted(set(DATASETS[config.task][1].__dataclass_fields__) - {"seed", "size"}))
        raise DataError(
            f"data.options do not fit {config.task}: {type(error).__name__}: {error}; its options: {known}"
        ) from error
    return [_write(config, options, entry) for entry in entries]


def _seed(config: ReasoningGymData) -> int:
    text = json.dumps([config.task, dict(config.options)], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def _write(config: ReasoningGymData, options: Mapping[str, Any], entry: Mapping[str, Any]) -> _Problem:
    fields = {**entry["metadata"], "question": entry["question"]}
    try:
        text = config.prompt.format(**fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise DataError(
            f"data.prompt {config.prompt!r} cannot be written ({type(error).__name__}: {error}); "
            f"fields of {config.task}: {', '.join(sorted(fields))}"
        ) from error
    text = text.translate(dict.fromkeys(map(ord, config.remove)))
    if not text:
        raise DataError(f"data.prompt {config.prompt!r} without the characters {config.remove!r} leaves no text")
    # Some metadata holds numbers that JSON lacks; no verifier reads those, which the probe confirms.
    plain = json.loads(json.dumps(entry, default=str))
    payload = {"task": config.task, "options": options, "entry": plain, "threshold": config.threshold}
    return _Problem(text, payload, reference_answer(config.task, plain))


def _distinct(config: ReasoningGymData, drawn: list[_Problem]) -> list[_Problem]:
    """The first problem of each text. Raises DataError where one text has answers that contradict each other."""
    first: dict[str, _Problem] = {}
    for problem in drawn:
        kept = first.setdefault(problem.text, problem)
        if problem.reference is None or problem.reference == kept.reference:
            continue
        if grade(kept.payload, problem.reference).score != 1.0:
            raise DataError(
                f"data.prompt {config.prompt!r} leaves out what the answer depends on: {problem.text!r} has the "
                f"answers {kept.reference!r} and {problem.reference!r}"
            )
    return list(first.values())


def _prompt(problem: _Problem, config: ReasoningGymData, tokenizer: Tokenizer) -> Prompt:
    try:
        return Prompt(
            id=f"{config.task}/{hashlib.sha256(problem.text.encode()).hexdigest()[:16]}",
            token_ids=prompt_ids(problem.text, config.chat, tokenizer),
            task=Task("reasoning_gym", problem.payload),
            answer_ids=() if problem.reference is None else answer_ids(problem.reference, tokenizer),
        )
    except DataError as error:
        raise DataError(
            f"a problem of {config.task} cannot be written, prompt {problem.text!r}, answer {problem.reference!r}: "
            f"{error}; add the characters to model.alphabet, or delete them from prompts with data.remove"
        ) from error
