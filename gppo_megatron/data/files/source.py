"""`data: {kind: files}`: files to the problems that a run trains and is evaluated on."""

import hashlib
import json
from typing import Any

from gppo_verifiers.types import Task

from gppo_megatron.config.schema import FileData
from gppo_megatron.data.files.adapters import ADAPTERS, Problem
from gppo_megatron.data.files.overlap import normalised
from gppo_megatron.data.files.sets import Say, Sets, read_sets
from gppo_megatron.data.files.sieve import Kept
from gppo_megatron.data.files.templates import TEMPLATES, Template, Writer
from gppo_megatron.data.render import Tokenizer
from gppo_megatron.data.split import Problems, is_held_out
from gppo_megatron.errors import DataError
from gppo_megatron.types import Prompt

ANSWERS = {"math": "a final answer", "code": "a program"}


def load_problems(config: FileData, tokenizer: Tokenizer, say: Say) -> Problems:
    """Read, check, write and split; the same files give the same problems. `say` gets progress and the report.

    Raises DataError for files that cannot be read, a template that does not ask for what is judged, stops the tokenizer
    cannot express, a side without problems, and, with `strict`, for every problem that would be left out.
    """
    template = TEMPLATES[config.template]
    for name in (config.adapter, config.evaluation_adapter or config.adapter):
        if ADAPTERS[name].verifier != template.verifier:
            raise DataError(
                f"data.template {config.template} asks for {ANSWERS[template.verifier]}, but the answers of "
                f"data.adapter {name} are {ANSWERS[ADAPTERS[name].verifier]}; choose another template: "
                + ", ".join(key for key, row in TEMPLATES.items() if row.verifier == ADAPTERS[name].verifier)
            )
    writer = Writer(template, config.chat, tokenizer)
    stop_ids = writer.stop_ids()
    sets = read_sets(config, writer, say)
    if config.strict and sets.dropped:
        raise DataError(f"data.strict: {sets.dropped} rows would be left out; mend them, or set it to false\n{sets}")
    train, heldout = _split(config, sets)
    if not train or not heldout:
        raise DataError(f"{len(train)} problems are left to train on and {len(heldout)} to evaluate on\n{sets}")
    say(str(sets))
    return Problems(
        train=tuple(_prompt(kept, config.adapter, template) for kept in train),
        heldout=tuple(_prompt(kept, config.evaluation_adapter or config.adapter, template) for kept in heldout),
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


def judges_programs(config: FileData) -> bool:
    """Whether answers of these data are programs."""
    names = (config.adapter, config.evaluation_adapter or config.adapter)
    return any(ADAPTERS[name].verifier == "code" for name in names)


def _prompt(kept: Kept, adapter: str, template: Template) -> Prompt:
    problem, written = kept.problem, kept.written
    assert written is not None, "problems are written while they are read"
    return Prompt(
        id=f"{adapter}/{hashlib.sha256(normalised(problem.text).encode()).hexdigest()[:16]}",
        token_ids=written.prompt_ids,
        task=_task(problem, template),
        answer_ids=written.answer_ids,
    )


def _task(problem: Problem, template: Template) -> Task:
    if template.verifier == "code":
        return Task("code", {**json.loads(problem.golds[0]), "answer": template.extractor})
    payload: dict[str, Any] = {"gold": _one_or_list(problem.golds), "extractor": template.extractor}
    if problem.tolerance is not None:
        payload["tolerance"] = problem.tolerance
    return Task("math", payload)


def _one_or_list(golds: tuple[str, ...]) -> str | list[str]:
    return golds[0] if len(golds) == 1 else list(golds)
