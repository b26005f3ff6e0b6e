"""Sampled accuracy on held-out prompts, by the same engine and the same verifiers as training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gppo_megatron.metrics import Last, Mean, StepMetrics
from gppo_megatron.types import Group, Prompt, Team, Trajectory, share_of


class GroupSource(Protocol):
    """Samples and judges the responses to prompts; `rollout.collect.Collector` is one."""

    def collect(
        self, prompts: Sequence[Prompt], places: Sequence[int], step: int, metrics: StepMetrics
    ) -> list[Group]: ...


@dataclass(frozen=True)
class Sample:
    """One answer as text. score: None where no verdict could be had."""

    prompt: str
    answer: str
    score: float | None


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """metrics: `evaluation/...` over all processes' answers, the same on every process.

    samples: the first answer to each of the first few prompts.
    """

    metrics: StepMetrics
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Evaluation:
    """Accuracy over fixed prompts, as many answers each as the collector's group has.

    The random numbers are the same each time, so two evaluations of a run differ by their weights alone and
    compare in pairs.

    Accuracy is the mean score over the answers that have one. An answer without a verdict is neither right nor
    wrong: it leaves the mean and is counted in `evaluation/no_score`, so read the two together.

    decode: tokens to text, special tokens removed. shown: how many answers are kept as text.
    """

    collector: GroupSource
    prompts: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]
    world: Team
    shown: int = 4

    def run(self) -> EvaluationResult:
        """Collective: every process answers its share of the prompts with the weights its engine holds."""
        mine = share_of(len(self.prompts), self.world)
        groups = self.collector.collect([self.prompts[place] for place in mine], mine, step=0, metrics=StepMetrics())
        everyone = [group for part in self.world.gather(groups) for group in part]
        samples = tuple(self._sample(group) for group in everyone[: self.shown])
        return EvaluationResult(_metrics(everyone), samples)

    def _sample(self, group: Group) -> Sample:
        first: Trajectory = group.trajectories[0]
        answer = self.decode(first.token_ids[first.trainable].tolist())
        return Sample(self.decode(group.prompt.token_ids), answer, first.verdict.score)


def _metrics(groups: Sequence[Group]) -> StepMetrics:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores = [score for group in groups for score in group.rewards if score is not None]
    finished = sum(trajectory.finish == "stop" for trajectory in trajectories)
    return StepMetrics(
        {
            "evaluation/accuracy": Mean(float(sum(scores)), float(len(scores))),
            "evaluation/finished": Mean(float(finished), float(len(trajectories))),
            # Each process holds the whole count: adding it over processes would count it several times.
            "evaluation/no_score": Last(float(len(trajectories) - len(scores))),
        }
    )


@dataclass
class Evaluate:
    """The evaluation as something done between steps; `samples` are the latest ones' answers."""

    evaluation: Evaluation
    samples: tuple[Sample, ...] = ()

    def __call__(self, step: int, metrics: StepMetrics) -> None:
        """Collective."""
        with metrics.time("evaluation"):
            result = self.evaluation.run()
        metrics.merge(result.metrics)
        self.samples = result.samples
