"""`data: {kind: files}`: files to the problems that a run trains and is evaluated on."""

import hashlib
from typing import Any

from gppo_verifiers.types import Task

from gppo_megatron.config.schema import FileData
from gppo_megatron.data.files.adapters import ADAPTERS
from gppo_megatron.data.files.overlap import normalised
from gppo_megatron.data.files.sets import Say, Sets, read_sets
from gppo_megatron.data.files.sieve import Kept
from gppo_megatron.data.files.templates import TEMPLATES, Writer
from gppo_megatron.data.render import Tokenizer
from gppo_megatron.data.split import Problems, is_held_out
from gppo_megatron.errors import DataError
from gppo_megatron.types import Prompt


def load_problems(config: FileData, tokenizer: Tokenizer, say: Say) -> Problems:
    """Read, check, write and split; the same files give the same problems. `say` gets progress and the report.

    Raises DataError for files that cannot be read, a set whose verifier there is none of, stops the tokenizer cannot
    express, a side without problems, and, with `strict`, for every problem that would be left out.
    """
    names = {config.adapter, config.evaluation_adapter or config.adapter}
    unjudged = sorted(name for name in names if ADAPTERS[name].verifier != "math")
    if unjudged:
        raise DataError(f"data.adapter {unjudged[0]}: programs cannot be judged yet, so this set cannot be trained on")
    writer = Writer(TEMPLATES[config.template], config.chat, tokenizer)
    stop_ids = writer.stop_ids()
    sets = read_sets(config, writer, say)
    if config.strict and sets.dropped:
        raise DataError(f"data.strict: {sets.dropped} rows would be left out; mend them, or set it to false\n{sets}")
    train, heldout = _split(config, sets)
    if not train or not heldout:
        raise DataError(f"{len(train)} problems are left to train on and {len(heldout)} to evaluate on\n{sets}")
    say(str(sets))
    return Problems(
        train=tuple(_prompt(kept, config.adapter, writer.template.extractor) for kept in train),
        heldout=tuple(
            _prompt(kept, config.evaluation_adapter or config.adapter, writer.template.extractor) for kept in heldout
        ),
        drawn=len(train) + len(heldout) + sets.train.report.count("duplicate"),
        duplicates=sets.train.report.count("duplicate"),
        stop_ids=stop_ids,
    )


def _split(config: FileData, sets: Sets) -> tuple[list[Kept], list[Kept]]:
    """What to train on and what to evaluate on."""
    if sets.evaluation is not None:
        return sets.train.problems, sets.evaluation.problems
    sides: tuple[list[Kept], list[Kept]] = ([], [])
    for kept in sets.train.problems:
        sides[is_held_out(normalised(kept.problem.text), config.holdout)].append(kept)
    return sides


def _prompt(kept: Kept, adapter: str, extractor: str) -> Prompt:
    problem, written = kept.problem, kept.written
    assert written is not None, "problems are written while they are read"
    payload: dict[str, Any] = {"gold": _one_or_list(problem.golds), "extractor": extractor}
    if problem.tolerance is not None:
        payload["tolerance"] = problem.tolerance
    return Prompt(
        id=f"{adapter}/{hashlib.sha256(normalised(problem.text).encode()).hexdigest()[:16]}",
        token_ids=written.prompt_ids,
        task=Task("math", payload),
        answer_ids=written.answer_ids,
    )


def _one_or_list(golds: tuple[str, ...]) -> str | list[str]:
    return golds[0] if len(golds) == 1 else list(golds)
