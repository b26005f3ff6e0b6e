"""How the rows of known data sets are read; a data set is one row of the table, the rest is a mapping of columns."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from gppo_verifiers.math.exact import read_number
from gppo_verifiers.math.extract import boxed
from gppo_verifiers.math.normalize import normalize
from gppo_verifiers.types import Task

from gppo_megatron.data.files.cells import answer_texts, cell, listed, problem_text, trimmed
from gppo_megatron.data.files.faults import Finding, UnusableRowError, excerpt
from gppo_megatron.data.files.program_sets import human_eval_task, livecodebench_task, mbpp_task
from gppo_megatron.data.files.programs import program_task
from gppo_megatron.data.files.templates import PROBLEM, TEMPLATES
from gppo_megatron.errors import DataError

Gold = Callable[[str], str]
"""From what an answer column says to the answer alone. Raises UnusableRowError."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A row as read: the bare problem, and its answers, of which each is right.

    golds: of a programming problem, the judge's payload, as one text in JSON; solution: a right program, if one is
    known. tolerance: how far a number may be off, relative to the answer. doubts: faults that do not keep it from use.
    """

    text: str
    golds: tuple[str, ...]
    tolerance: float | None = None
    doubts: tuple[Finding, ...] = ()
    solution: str | None = None


@dataclass(frozen=True)
class Adapter:
    """problem, answers: the columns that may hold them (dotted paths); the first that a file has is read.

    around: the template that every problem comes in, up to and from the problem itself.
    only: (column, value); rows that say otherwise are of another kind.
    extra: columns read where a file has them; finish: the problem in the light of these (a missing one is None).
    listed: whether an answer in brackets is a list of answers, and no interval.
    verifier: the kind that judges answers.
    """

    problem: tuple[str, ...]
    answers: Mapping[str, Gold]
    around: tuple[str, str] = ("", "")
    only: tuple[str, str] | None = None
    extra: tuple[str, ...] = ()
    finish: Callable[[Problem, Mapping[str, Any]], Problem] = lambda problem, extra: problem
    listed: bool = False
    verifier: Literal["math", "code"] = "math"


def as_it_is(text: str) -> str:
    return text


def after_hashes(text: str) -> str:
    """GSM8K: a worked solution with <<calculations>>, and on its last line #### and a number that may hold commas."""
    _, hashes, answer = text.rpartition("####")
    if not hashes:
        raise UnusableRowError("missing_gold", f"no #### in {excerpt(text)}")
    return re.sub(r"(?<=\d),(?=\d{3})", "", trimmed(re.sub(r"<<.*?>>", "", answer)))


def contest_integer(text: str) -> str:
    """AIME: 0 to 999, perhaps with leading zeros or a degree sign."""
    bare = re.sub(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\N{DEGREE SIGN})$", "", text)
    return str(int(bare)) if re.fullmatch(r"[0-9]{1,4}", bare) else bare


def last_box(text: str) -> str:
    """A worked solution that ends in a box."""
    content = boxed(text)
    if content is None:
        raise UnusableRowError("missing_gold", f"no \\boxed{{...}} in {excerpt(text)}")
    return content


def boxed_integer(text: str) -> str:
    return contest_integer(last_box(text))


def whole_number(text: str) -> str:
    """AMC: integers written as decimals."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text)


def without_dollars(text: str) -> str:
    """OlympiadBench: LaTeX, in some copies between dollar signs."""
    inner = re.fullmatch(r"\${1,2}([^$]*)\${1,2}", text)
    return trimmed(inner[1]) if inner else text


def olympiad(problem: Problem, extra: Mapping[str, Any]) -> Problem:
    """OlympiadBench: text that several problems share, answers in parts, an accepted error, answers for people only."""
    if extra["modality"] == "Multimodal":
        raise UnusableRowError("missing_image", "the problem needs a picture")
    if extra["answer_type"] == "Need_human_evaluate":
        raise UnusableRowError("missing_gold", "the answer needs a human to judge it")
    text = f"{extra['context']}\n\n{problem.text}" if extra["context"] else problem.text
    gold = ", ".join(problem.golds)
    if extra["error"] in (None, ""):
        return Problem(text, (gold,))
    tolerance = _relative(str(extra["error"]), gold)
    doubt = Finding("unused_tolerance", f"an error of {extra['error']!a} cannot be applied to the answer {gold[:80]!a}")
    return Problem(text, (gold,), tolerance, () if tolerance else (doubt,))


def within_a_hundredth(problem: Problem, extra: Mapping[str, Any]) -> Problem:
    """Minerva: measured quantities, where an answer of other rounding is as right."""
    return replace(problem, tolerance=0.01)


def tests_of(text: str) -> str:
    """Programming problems whose tests are {inputs, outputs}, perhaps with a fn_name."""
    return _payload(program_task(text))


def with_starter(problem: Problem, extra: Mapping[str, Any]) -> Problem:
    """The code that a program must begin with, or the signature it must have, is part of the problem."""
    starter = extra.get("starter_code")
    if not isinstance(starter, str) or not starter.strip():
        return problem
    return replace(problem, text=f"{problem.text}\n\nUse this code as the beginning:\n{starter.rstrip()}")


def livecodebench(problem: Problem, extra: Mapping[str, Any]) -> Problem:
    task = livecodebench_task(problem.golds[0], extra["private_test_cases"], extra["metadata"])
    return with_starter(replace(problem, golds=(_payload(task),)), extra)


def human_eval(problem: Problem, extra: Mapping[str, Any]) -> Problem:
    """HumanEval: the problem is the head of a function with its description."""
    task = human_eval_task("\n".join(problem.golds), extra["prompt"], extra["entry_point"])
    text = f"Complete this function:\n\n{problem.text}"
    solution = f"{extra['prompt']}{extra['canonical_solution'] or ''}" if extra["canonical_solution"] else None
    return replace(problem, text=text, golds=(_payload(task),), solution=solution)


def mbpp(problem: Problem, extra: Mapping[str, Any]) -> Problem:
    """MBPP: nothing but the asserts says what the function is called."""
    task = mbpp_task(problem.golds, extra["code"], extra["test_setup_code"], extra["test_imports"])
    text = "\n".join([problem.text, "", "These must hold:", *problem.golds])
    return replace(problem, text=text, golds=(_payload(task),), solution=extra["code"])


def with_solution(problem: Problem, extra: Mapping[str, Any]) -> Problem:
    return replace(problem, solution=extra["solution"] or None)


def _payload(task: Task) -> str:
    return json.dumps(task.payload)


DAPO_BEFORE, DAPO_AFTER = TEMPLATES["dapo"].user.split(PROBLEM)

ADAPTERS: dict[str, Adapter] = {
    "plain": Adapter(("prompt",), {"answer": as_it_is}),
    "gsm8k": Adapter(("question",), {"answer": after_hashes}),
    "math500": Adapter(("problem",), {"answer": as_it_is, "solution": last_box}),
    "aime": Adapter(("problem", "question"), {"answer": contest_integer, "solution": boxed_integer}),
    "amc": Adapter(("question", "problem"), {"answer": whole_number}),
    "olympiadbench": Adapter(
        problem=("question", "problem"),
        answers={"final_answer": without_dollars},
        extra=("modality", "answer_type", "context", "error"),
        finish=olympiad,
        listed=True,
    ),
    "minerva": Adapter(("question", "problem"), {"answer": as_it_is, "solution": last_box}, finish=within_a_hundredth),
    "deepscaler": Adapter(("problem",), {"answer": as_it_is}),
    "dapo_math": Adapter(("prompt",), {"reward_model.ground_truth": as_it_is}, (DAPO_BEFORE, DAPO_AFTER)),
    "eurus2_math": Adapter(
        problem=("prompt",),
        answers={"reward_model.ground_truth": as_it_is},
        around=("", "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"),
        only=("ability", "math"),
    ),
    "eurus2_code": Adapter(
        problem=("prompt",),
        answers={"reward_model.ground_truth": tests_of},
        around=(
            "",
            "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end.",
        ),
        only=("ability", "code"),
        verifier="code",
    ),
    "programs": Adapter(("prompt",), {"tests": tests_of}, extra=("solution",), finish=with_solution, verifier="code"),
    "apps": Adapter(
        ("question",), {"input_output": tests_of}, extra=("starter_code",), finish=with_starter, verifier="code"
    ),
    "livecodebench": Adapter(
        problem=("question_content",),
        answers={"public_test_cases": as_it_is},
        extra=("private_test_cases", "metadata", "starter_code"),
        finish=livecodebench,
        verifier="code",
    ),
    "human_eval": Adapter(
        problem=("prompt",),
        answers={"test": as_it_is},
        extra=("prompt", "entry_point", "canonical_solution"),
        finish=human_eval,
        verifier="code",
    ),
    "mbpp": Adapter(
        problem=("text", "prompt"),
        answers={"test_list": as_it_is},
        extra=("code", "test_setup_code", "test_imports"),
        finish=mbpp,
        verifier="code",
    ),
}


@dataclass(frozen=True)
class RowReader:
    """An adapter on a file whose columns are known. columns: the top-level ones it reads."""

    adapter: Adapter
    problem: str
    answer: str
    gold: Gold
    columns: tuple[str, ...]

    def read(self, values: Mapping[str, Any]) -> Problem:
        """Raises UnusableRowError for a row that holds no problem with an answer."""
        adapter = self.adapter
        if adapter.only and (kind := cell(values, adapter.only[0])) != adapter.only[1]:
            raise UnusableRowError("other_kind", f"{adapter.only[0]} is {kind!a}")
        text = self._bare(problem_text(cell(values, self.problem), self.problem))
        value = cell(values, self.answer)
        value = listed(value, self.answer) if adapter.listed else value
        golds = tuple(self.gold(gold) for gold in answer_texts(value, self.answer))
        if not golds:
            raise UnusableRowError("missing_gold", f"{self.answer} is empty")
        return adapter.finish(Problem(text, golds), {name: cell(values, name) for name in adapter.extra})

    def _bare(self, text: str) -> str:
        """The problem without the template around it. `strip` would take letters of the problem along."""
        before, after = self.adapter.around
        if text and not (text.startswith(before) and text.endswith(after)):
            raise UnusableRowError("unexpected_template", f"not in the template of this set: {excerpt(text)}")
        bare = text.removeprefix(before).removesuffix(after)
        if not bare.strip():
            raise UnusableRowError("missing_problem", f"{self.problem} is empty")
        return bare


def reader_for(adapter: Adapter, columns: Mapping[str, str], file: Path, present: Collection[str]) -> RowReader:
    """The adapter on a file with the columns `present`; `columns` names others for its `prompt` or `answer`.

    Raises DataError where the file lacks a column that is needed.
    """
    golds = list(adapter.answers.values())
    answers = {columns["answer"]: golds[0]} if "answer" in columns else adapter.answers
    problem = _choose((columns["prompt"],) if "prompt" in columns else adapter.problem, file, present)
    answer = _choose(answers, file, present)
    kind = [_choose((adapter.only[0],), file, present)] if adapter.only else []
    paths = [problem, answer, *kind, *(name for name in adapter.extra if name in present)]
    return RowReader(
        adapter, problem, answer, answers[answer], tuple(dict.fromkeys(path.split(".")[0] for path in paths))
    )


def _choose(paths: Iterable[str], file: Path, present: Collection[str]) -> str:
    """The first path whose column is there; a column whose own name holds a dot is not read."""
    wanted = list(paths)
    for path in wanted:
        if path.split(".")[0] in present:
            return path
    near = get_close_matches(wanted[0], list(present), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(
        f"{file}: no column {' or '.join(map(repr, wanted))}; it has {', '.join(map(repr, present))}{hint}. "
        "Choose the adapter of this data, or say which columns hold prompt and answer"
    )


def _relative(error: str, gold: str) -> float | None:
    """An absolute error relative to the answer; None unless that is one number other than 0."""
    try:
        absolute = float(error)
    except ValueError:
        return None
    number = read_number(normalize(gold))
    if number is None or number.value == 0 or not 0 < absolute < math.inf:
        return None
    return absolute / abs(float(number.value))
