"""A model folder on a whole set of problems: several answers each, every one kept, resumable."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gppo_megatron.evaluate.answers import AnswerFile, ProblemAnswers
from gppo_megatron.evaluate.held_out import GroupSource
from gppo_megatron.evaluate.statistics import Estimate, average, pass_at
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.types import Group, Prompt


@dataclass(frozen=True)
class Examination:
    """Asks every prompt for as many answers as the collector's group has, `chunk` prompts at a time.

    An answer depends on the weights, the seed and the prompt's place alone, so a resumed examination gives the answers
    that an uninterrupted one would have.
    """

    collector: GroupSource
    prompts: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]
    file: AnswerFile
    say: Callable[[str], None]
    chunk: int = 16

    def run(self) -> list[ProblemAnswers]:
        """Answer what the file does not hold yet; all problems' answers, in their order."""
        held = self.file.read()
        todo = [place for place in range(len(self.prompts)) if place not in held]
        if held:
            self.say(f"{len(held)} of {len(self.prompts)} problems were answered before")
        start = time.perf_counter()
        for first in range(0, len(todo), self.chunk):
            places = todo[first : first + self.chunk]
            prompts = [self.prompts[place] for place in places]
            groups = self.collector.collect(prompts, places, step=0, metrics=StepMetrics())
            for place, group in zip(places, groups, strict=True):
                held[place] = self._answers(place, group)
                self.file.append(held[place])
            self._report(held, done=first + len(places), todo=len(todo), seconds=time.perf_counter() - start)
        return [held[place] for place in range(len(self.prompts))]

    def _answers(self, place: int, group: Group) -> ProblemAnswers:
        return ProblemAnswers(
            place=place,
            id=group.prompt.id,
            prompt=self.decode(group.prompt.token_ids),
            answers=tuple(self.decode(t.token_ids[t.trainable].tolist()) for t in group.trajectories),
            finishes=tuple(trajectory.finish for trajectory in group.trajectories),
            scores=group.rewards,
            statuses=tuple(trajectory.verdict.status.value for trajectory in group.trajectories),
        )

    def _report(self, held: Mapping[int, ProblemAnswers], done: int, todo: int, seconds: float) -> None:
        so_far = average([answers.scores for answers in held.values()])
        left = seconds / done * (todo - done)
        self.say(f"{len(held)}/{len(self.prompts)} problems  {so_far.value:.3f} so far  {left:.0f} s left")


def table(answers: Sequence[ProblemAnswers]) -> str:
    """avg@n and pass@k for k = 1, 2, 4 ... n in words, with what the numbers rest on."""
    scores = [of_problem.scores for of_problem in answers]
    samples = len(scores[0])
    rows = [(f"avg@{samples}", average(scores))]
    powers = [2**power for power in range(samples.bit_length())]
    rows += [(f"pass@{k}", pass_at(k, scores)) for k in sorted({*powers, samples}) if samples > 1]
    missing = sum(score is None for of_problem in scores for score in of_problem)
    finished = sum(finish == "stop" for of_problem in answers for finish in of_problem.finishes)
    total = samples * len(answers)
    lines = [f"{len(answers)} problems x {samples} answers; {finished / total:.1%} ended by themselves"]
    lines += [_row(name, estimate) for name, estimate in rows]
    if missing:
        lines.append(f"{missing} answers have no verdict: counted as wrong, and as right in the range's upper end")
    return "\n".join(lines)


def _row(name: str, estimate: Estimate) -> str:
    low, high = estimate.interval
    unknown = f"  range {estimate.lowest:.4f} to {estimate.highest:.4f}" if estimate.highest > estimate.lowest else ""
    return f"{name:<10}{estimate.value:.4f}  95 % interval {low:.4f} to {high:.4f}{unknown}"
