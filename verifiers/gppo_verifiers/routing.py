"""Several judges as one: each has its kinds of task."""

from collections.abc import Mapping, Sequence

from gppo_verifiers.types import Answer, Judge, Verdict


class ByKind:
    """Implements `Judge`. judges: by the kind of task they take; `otherwise` takes all other kinds."""

    def __init__(self, judges: Mapping[str, Judge], otherwise: Judge) -> None:
        self._judges = judges
        self._otherwise = otherwise

    def judge(self, answers: Sequence[Answer]) -> list[Verdict]:
        places: dict[str, list[int]] = {}
        for place, answer in enumerate(answers):
            kind = answer.task.kind
            places.setdefault(kind if kind in self._judges else "", []).append(place)
        verdicts: dict[int, Verdict] = {}
        for kind, chosen in places.items():
            judge = self._judges[kind] if kind else self._otherwise
            verdicts |= zip(chosen, judge.judge([answers[place] for place in chosen]), strict=True)
        return [verdicts[place] for place in range(len(answers))]

    def close(self) -> None:
        for judge in (*self._judges.values(), self._otherwise):
            judge.close()
