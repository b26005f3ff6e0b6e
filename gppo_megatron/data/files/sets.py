"""The sets of a `data: {kind: files}`, read and checked: one to train on, and perhaps one to evaluate on."""

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from gppo_verifiers.math.grading import self_check
from gppo_verifiers.pool import WorkerPool
from gppo_verifiers.types import Answer, Task

from gppo_megatron.config.schema import FileData
from gppo_megatron.data.files.adapters import ADAPTERS, Adapter, reader_for
from gppo_megatron.data.files.faults import Report, UnusableRowError
from gppo_megatron.data.files.overlap import TextIndex
from gppo_megatron.data.files.readers import columns_of, files_of, read_rows
from gppo_megatron.data.files.sieve import Checks, Kept, ReadRow, Sieve
from gppo_megatron.data.files.templates import TEMPLATES, Writer

PROGRESS_SECONDS = 2.0
COMPARISON_SECONDS = 5.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Collected:
    """The sound problems of one set, and the report on it."""

    problems: list[Kept]
    report: Report


@dataclass(frozen=True)
class Sets:
    """evaluation: None where the run splits `train`."""

    train: Collected
    evaluation: Collected | None

    @property
    def dropped(self) -> int:
        return self.train.report.dropped + (self.evaluation.report.dropped if self.evaluation else 0)

    def __str__(self) -> str:
        reports = [self.evaluation.report] if self.evaluation else []
        return "\n".join(str(report) for report in (*reports, self.train.report))


class SameAnswer:
    """Whether two known answers say the same, by the math verifier in a worker process, each within a deadline.

    What cannot be compared (an answer that is no mathematics, a formula too hard) is not the same. The process starts
    when it is first needed: few data sets give one problem two answers.
    """

    def __init__(self, timeout_seconds: float = COMPARISON_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._pool: WorkerPool | None = None

    def __call__(self, first: str, second: str) -> bool:
        if self._pool is None:
            self._pool = WorkerPool(1, self._timeout_seconds)
        task = Task("math", {"gold": first, "extractor": "whole"})
        return self._pool.judge([Answer(task, second)])[0].score == 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.close()


def read_sets(config: FileData, writer: Writer | None, say: Say) -> Sets:
    """Both sets, checked; without a writer the length of prompts is not. Raises DataError for unreadable files."""
    with SameAnswer() as same:
        return _read_sets(config, writer, say, same)


def _read_sets(config: FileData, writer: Writer | None, say: Say, same: SameAnswer) -> Sets:
    extractor = TEMPLATES[config.template].extractor

    def verify(gold: str) -> str | None:
        return self_check(gold, extractor)

    def checks(adapter: Adapter, repeats: bool, evaluation: TextIndex | None) -> Checks:
        return Checks(
            self_check=verify if adapter.verifier == "math" else None,
            same=same if adapter.verifier == "math" else operator.eq,
            write=writer.write if writer else None,
            max_prompt_tokens=config.max_prompt_tokens,
            in_template=config.template != "none",
            repeats=repeats,
            evaluation=evaluation,
        )

    evaluation, index = None, None
    if config.evaluation is not None:
        adapter = ADAPTERS[config.evaluation_adapter or config.adapter]
        columns = config.columns if config.evaluation_adapter is None else {}
        evaluation = _read(config.evaluation, adapter, columns, checks(adapter, config.evaluation_repeats, None), say)
        index = TextIndex()
        for kept in evaluation.problems:
            index.add(kept.problem.text, str(kept.origin))
    adapter = ADAPTERS[config.adapter]
    return Sets(_read(config.path, adapter, config.columns, checks(adapter, False, index), say), evaluation)


def _read(path: str, adapter: Adapter, columns: Mapping[str, str], checks: Checks, say: Say) -> Collected:
    sieve = Sieve(path, checks)
    problems = sieve.sift(_with_progress(path, _rows(files_of(path), adapter, columns), say))
    return Collected(problems, sieve.report)


def _rows(files: Iterable[Path], adapter: Adapter, columns: Mapping[str, str]) -> Iterator[ReadRow]:
    for file in files:
        reader = reader_for(adapter, columns, file, columns_of(file))
        for row in read_rows(file, reader.columns):
            try:
                yield ReadRow(row.origin, reader.read(row.values))
            except UnusableRowError as error:
                yield ReadRow(row.origin, error.finding)


def _with_progress(path: str, rows: Iterator[ReadRow], say: Say) -> Iterator[ReadRow]:
    """The rows, with a line every few seconds on how many there have been."""
    start = last = time.monotonic()
    for count, row in enumerate(rows, 1):
        yield row
        if count % 256 == 0 and (now := time.monotonic()) - last >= PROGRESS_SECONDS:
            last = now
            say(f"{path}: {count:,} rows, {count / (now - start):,.0f} rows/s")
