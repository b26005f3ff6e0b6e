"""Rows to distinct, sound problems. What is left out or doubtful goes into a report; nothing disappears in silence."""

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from gppo_megatron.data.files.adapters import Problem
from gppo_megatron.data.files.cells import trimmed
from gppo_megatron.data.files.faults import Finding, Report
from gppo_megatron.data.files.overlap import TextIndex, digest
from gppo_megatron.data.files.readers import Origin
from gppo_megatron.data.files.templates import Written
from gppo_megatron.data.files.text_faults import gold_findings, is_missing, text_findings
from gppo_megatron.errors import DataError

LONGEST_MESSAGE = 120
WRAPPED = re.compile(r"\$\$?(?P<dollars>[^$]+)\$\$?|\\boxed\{(?P<box>(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})+)\}")


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row, and the problem read from it or what kept that from being read."""

    origin: Origin
    result: Problem | Finding


@dataclass(frozen=True, slots=True)
class Kept:
    """A problem fit for use. written: None where no tokenizer is at hand."""

    problem: Problem
    origin: Origin
    written: Written | None


@dataclass(frozen=True)
class Checks:
    """What a problem must pass.

    self_check: why the verifier does not take a known answer for right, or None where it does.
        None: the golds are no answers, but what tests one; there may be a solution besides.
    same: whether two known answers say the same; asked where they are not written alike.
    write: a problem and an answer, where one is known, to tokens; None where no tokenizer is at hand.
    in_template: whether a template is put around the problems, so that they must bring none.
    repeats: whether a problem may be there several times.
    evaluation: the problems to evaluate on, which must not be trained on.
    """

    self_check: Callable[[str], str | None] | None
    write: Callable[[str, str | None], Written] | None
    max_prompt_tokens: int
    same: Callable[[str, str], bool] = operator.eq
    in_template: bool = True
    repeats: bool = False
    evaluation: TextIndex | None = None


@dataclass(slots=True)
class _First:
    """What is remembered of each text: the row it first stood in."""

    golds: tuple[str, ...]
    origin: Origin
    conflicting: bool = False


class Sieve:
    """Takes rows one by one. Of each text only the first is kept, and none where later ones contradict its answer."""

    def __init__(self, source: str, checks: Checks) -> None:
        self.report = Report(source)
        self._checks = checks
        self._first: dict[bytes, _First] = {}
        self._kept: list[tuple[bytes, Kept]] = []
        self._verdicts: dict[str, str | None] = {}

    def sift(self, rows: Iterable[ReadRow]) -> list[Kept]:
        """The problems fit for use, in the order of their rows. `report` is complete afterwards."""
        for row in rows:
            self.report.rows += 1
            if isinstance(row.result, Finding):
                self.report.add(row.result, row.origin)
            else:
                self._take(row.result, row.origin)
        sound = [kept for key, kept in self._kept if not self._first[key].conflicting]
        withdrawn = len(self._kept) - len(sound)
        if withdrawn:
            # Kept before a later row contradicted them; that later one is the report's example.
            self.report.tallies["conflicting_golds"].count += withdrawn
        self.report.kept = len(sound)
        return sound

    def _take(self, problem: Problem, origin: Origin) -> None:
        key = digest(problem.text)
        golds = tuple(unwrapped(gold) for gold in problem.golds)
        if self._checks.self_check is not None and any(map(is_missing, golds)):
            self.report.add(Finding("missing_gold", f"the answer is {next(filter(is_missing, golds))!a}"), origin)
            return
        first = self._first.setdefault(key, _First(golds, origin))
        if first.conflicting or not self._agree(first.golds, golds):
            first.conflicting = True
            detail = f"the answer is {golds[0][:40]!a}, but {first.golds[0][:40]!a} in {first.origin}"
            self.report.add(Finding("conflicting_golds", detail), origin)
        elif first.origin is origin or self._checks.repeats:
            kept = self._inspect(problem, origin)
            if kept is not None:
                self._kept.append((key, kept))
        else:
            self.report.add(Finding("duplicate", f"the problem of {first.origin}"), origin)

    def _agree(self, first: tuple[str, ...], golds: tuple[str, ...]) -> bool:
        same = self._checks.same
        return first == golds or (len(first) == len(golds) and all(map(same, first, golds)))

    def _inspect(self, problem: Problem, origin: Origin) -> Kept | None:
        """The problem ready for use, or None where a fault forbids that."""
        found = {finding.fault: finding for finding in self._findings(problem)}
        problem = replace(
            problem,
            text=trimmed(problem.text),
            golds=tuple(unwrapped(gold) for gold in problem.golds),
        )
        written = None
        if self._checks.write is not None and not any(finding.drops for finding in found.values()):
            written = self._written(problem, self._checks.write, found)
        for finding in found.values():
            self.report.add(finding, origin)
        if any(finding.drops for finding in found.values()):
            return None
        return Kept(problem, origin, written)

    def _written(
        self, problem: Problem, write: Callable[[str, str | None], Written], found: dict[str, Finding]
    ) -> Written | None:
        """The problem in tokens; what forbids that is added to `found`."""
        try:
            written = write(problem.text, problem.golds[0] if self._checks.self_check else problem.solution)
        except DataError as error:
            found["unwritable"] = Finding("unwritable", _end_of(str(error)))
            return None
        length, limit = len(written.prompt_ids), self._checks.max_prompt_tokens
        if length > limit:
            found["long_prompt"] = Finding("long_prompt", f"{length} tokens, and {limit} are the limit")
        return written

    def _findings(self, problem: Problem) -> Iterator[Finding]:
        checks = self._checks
        yield from problem.doubts
        yield from text_findings(problem.text, checks.in_template)
        if checks.self_check is not None:
            for gold in problem.golds:
                yield from self._gold_findings(gold, checks.self_check)
        if checks.evaluation is not None:
            yield from _overlaps(problem.text, checks.evaluation)

    def _gold_findings(self, gold: str, self_check: Callable[[str], str | None]) -> Iterator[Finding]:
        bare = unwrapped(gold)
        if bare != trimmed(gold):
            yield Finding("wrapped_gold", f"the answer is {gold[:80]!a}, read as {bare[:80]!a}")
        findings = list(gold_findings(bare))
        yield from findings
        if any(finding.drops for finding in findings):
            return
        if bare not in self._verdicts:
            self._verdicts[bare] = self_check(bare)
        reason = self._verdicts[bare]
        if reason is not None:
            yield Finding("unverifiable_gold", f"the answer is {bare[:80]!a}: {reason}")


def _end_of(text: str) -> str:
    """The end of a message that begins with the whole problem."""
    return text if len(text) <= LONGEST_MESSAGE else f"...{text[-LONGEST_MESSAGE:]}"


def unwrapped(gold: str) -> str:
    r"""The answer without the $...$ or \boxed{...} that stands around the whole of it."""
    bare = trimmed(gold)
    match = WRAPPED.fullmatch(bare)
    return trimmed(match["dollars"] or match["box"]) if match else bare


def _overlaps(text: str, evaluation: TextIndex) -> Iterator[Finding]:
    same = evaluation.same(text)
    if same is not None:
        yield Finding("overlap", f"the problem of {same}")
        return
    similar = evaluation.similar(text)
    if similar is not None:
        yield Finding("near_overlap", f"13 words in a row of {similar}")
