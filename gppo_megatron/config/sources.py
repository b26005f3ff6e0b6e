"""The sections `filtering:` and `prefetch:`: which sampled groups are trained on, and how far sampling runs ahead."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NoSignal:
    """Drops groups in which every advantage would be 0: equal rewards, or no answer that carries loss."""

    kind: Literal["no_signal"] = "no_signal"


@dataclass(frozen=True)
class MeanScore:
    """Drops groups whose mean score is outside [low, high]: too hard, or too easy."""

    kind: Literal["score"] = "score"
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class Unfinished:
    """Drops groups in which more than `share` of the answers ended at the token limit."""

    kind: Literal["unfinished"] = "unfinished"
    share: float = 0.5


@dataclass(frozen=True)
class Mask:
    """Answers that ended at the token limit carry no loss; their reward stays in the group's baseline."""

    kind: Literal["mask"] = "mask"


@dataclass(frozen=True)
class SoftPenalty:
    """DAPO's soft over-long punishment (arXiv 2503.14476, equation 13): within the last `buffer` tokens below
    rollout.max_new_tokens the reward falls linearly, by `weight` at the limit."""

    buffer: int
    kind: Literal["penalty"] = "penalty"
    weight: float = 1.0


@dataclass(frozen=True)
class Filtering:
    """What becomes of sampled groups.

    overlong: of answers near or at the token limit; null: they are answers like others.
    filters: groups that any of them drops are not trained on. extra_prompts: most prompts a step samples to take
    their places; a place that stays empty carries no loss.
    """

    overlong: Mask | SoftPenalty | None = None
    filters: tuple[NoSignal | MeanScore | Unfinished, ...] = ()
    extra_prompts: int = 0


@dataclass(frozen=True)
class Prefetch:
    """Sampling by servers while training goes on.

    max_lag: rollouts that sampling runs ahead, 0: training waits for it. No token is trained on that was sampled by
    weights more than max_lag x batch.updates optimizer steps older than those of the rollout's first optimizer step.
    over_sampling: prompts a step samples beyond those it needs, so that it need not wait for as many stragglers.
    """

    max_lag: int = 0
    over_sampling: int = 0
