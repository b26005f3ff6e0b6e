"""The answers of an evaluation as JSON lines, one a problem: what a stopped evaluation resumes from."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gppo_megatron.errors import ConfigError, DataError

ANSWERS, SETTINGS = "answers.jsonl", "settings.json"


@dataclass(frozen=True)
class ProblemAnswers:
    """All answers to one problem: its place in the set, texts as the model wrote them, scores (None: no verdict)."""

    place: int
    id: str
    prompt: str
    answers: tuple[str, ...]
    finishes: tuple[str, ...]
    scores: tuple[float | None, ...]
    statuses: tuple[str, ...]


class AnswerFile:
    """`folder`/answers.jsonl, made if missing; settings say what the answers depend on."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError where `folder` cannot be made, or holds answers given under other settings."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made: {error.strerror}; choose another --out") from error
        self._path = folder / ANSWERS
        written = json.dumps(settings, indent=1, sort_keys=True)
        held = folder / SETTINGS
        if held.exists() and held.read_text(encoding="utf-8") != written:
            changed = _differences(json.loads(held.read_text(encoding="utf-8")), json.loads(written))
            raise ConfigError(
                f"{folder} holds answers given under other settings ({', '.join(changed)} differ); "
                "choose another --out, or remove it"
            )
        held.write_text(written, encoding="utf-8")

    def read(self) -> dict[int, ProblemAnswers]:
        """place -> what was answered; a last line that a kill left unfinished is cut off the file."""
        if not self._path.exists():
            return {}
        text = self._path.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1]
        if complete != text:
            self._path.write_text(complete, encoding="utf-8")
        try:
            lines = [json.loads(line) for line in complete.splitlines()]
            return {line["place"]: _parsed(line) for line in lines}
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(f"{self._path}: damaged ({error}); remove it and evaluate again") from error

    def append(self, answers: ProblemAnswers) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(answers), ensure_ascii=True) + "\n")


def _parsed(line: Mapping[str, Any]) -> ProblemAnswers:
    return ProblemAnswers(
        place=int(line["place"]),
        id=line["id"],
        prompt=line["prompt"],
        answers=tuple(line["answers"]),
        finishes=tuple(line["finishes"]),
        scores=tuple(line["scores"]),
        statuses=tuple(line["statuses"]),
    )


def _differences(held: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in held.keys() | given.keys() if held.get(key) != given.get(key))
