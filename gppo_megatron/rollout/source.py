"""Where a step's groups come from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from gppo_verifiers.types import Status, Verdict

from gppo_megatron.data.prompts import StreamState
from gppo_megatron.errors import CheckpointError, DataError
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.rollout.collect import Collector
from gppo_megatron.types import Group, Prompt, Team, Trajectory, share_of, turns_of


class PromptStream(Protocol):
    """Prompts without end; the same ones in the same order on every process."""

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        ...

    def state(self) -> StreamState: ...

    def restore(self, state: StreamState) -> None: ...


@dataclass(frozen=True)
class Synchronous:
    """Samples from the current weights while training waits.

    Every process takes the same prompts. They are dealt out in turn to the data-parallel ranks, so that each optimizer
    step of the rollout trains on the same ones whatever their number; the processes of a replica sample one part of
    its share each. The groups do not depend on the layout.
    """

    stream: PromptStream
    collector: Collector
    prompts_per_step: int
    data: Team
    replica: Team

    def next_groups(self, step: int, metrics: StepMetrics) -> list[Group]:
        """Collective: this data-parallel rank's groups, in the order of their prompts."""
        prompts = self.stream.take(self.prompts_per_step)
        owned = turns_of(len(prompts), self.data)
        part = share_of(len(owned), self.replica)
        mine = owned[part.start : part.stop]
        groups = self.collector.collect([prompts[place] for place in mine], mine, step, metrics)
        return [group for sampled in self.replica.gather(groups) for group in sampled]

    def state(self) -> Mapping[str, Any]:
        """The place in the data; nothing is sampled ahead."""
        return asdict(self.stream.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a place that these data do not have."""
        restore_stream(self.stream, state)


@dataclass(frozen=True)
class GivenAnswers:
    """The reference answers as if they had been sampled: supervised learning's rollouts.

    Their policy version is -1, their sampler log-probs are 0 and their score is 1.
    """

    stream: PromptStream
    prompts_per_step: int
    data: Team

    def next_groups(self, step: int, metrics: StepMetrics) -> list[Group]:
        """This data-parallel rank's groups, one trajectory each. Raises DataError for a prompt without an answer."""
        prompts = self.stream.take(self.prompts_per_step)
        return [Group(prompts[place], (given_answer(prompts[place]),)) for place in turns_of(len(prompts), self.data)]

    def state(self) -> Mapping[str, Any]:
        """The place in the data; nothing is sampled ahead."""
        return asdict(self.stream.state())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError for a place that these data do not have."""
        restore_stream(self.stream, state)


def restore_stream(stream: PromptStream, state: Mapping[str, Any]) -> None:
    """Set the stream to `state`. Raises CheckpointError for a place that its data do not have."""
    try:
        stream.restore(StreamState(**state))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's place in the data does not fit these data: {error}") from error


def given_answer(prompt: Prompt) -> Trajectory:
    """A prompt's reference answer, every token of it trainable. Raises DataError where there is none."""
    if not prompt.answer_ids:
        raise DataError(f"prompt {prompt.id} has no reference answer to learn from; remove warmup from the run")
    before, length = len(prompt.token_ids), len(prompt.token_ids) + len(prompt.answer_ids)
    return Trajectory(
        token_ids=np.array(prompt.token_ids + prompt.answer_ids, dtype=np.int64),
        sampler_logprobs=np.zeros(length, dtype=np.float32),
        trainable=np.arange(length) >= before,
        policy_versions=np.full(length, -1, dtype=np.int64),
        finish="stop",
        verdict=Verdict(1.0, Status.GRADED),
    )
