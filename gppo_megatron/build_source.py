"""RunConfig -> where a step's groups come from; a part of `build`."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from gppo_megatron.build_judge import open_judge
from gppo_megatron.build_rollout import Rollouts
from gppo_megatron.config import schema
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.rollout import filters
from gppo_megatron.rollout.collect import Collector
from gppo_megatron.rollout.prefetch import Pace, Prefetching
from gppo_megatron.rollout.source import PromptStream, Synchronous
from gppo_megatron.rollout.workers import Background, Inline, Workers
from gppo_megatron.train import RolloutSource
from gppo_megatron.types import Topology


@contextmanager
def open_source(
    config: RunConfig, stream: PromptStream, collector: Collector, rollouts: Rollouts, teams: Topology
) -> Iterator[RolloutSource]:
    """Collective: the groups of a run's training, until the block ends. collector: of the calling thread."""
    if config.filtering == schema.Filtering() and config.prefetch == schema.Prefetch():
        yield Synchronous(stream, collector, config.batch.prompts, teams.data, teams.replica)
        return
    workers: Workers = Inline(collector)
    if config.prefetch != schema.Prefetch():
        assert rollouts.beginning is not None
        workers = Background(rollouts.beginning, lambda: replace(collector, judge=open_judge(config)))
    pace = Pace(
        prompts=config.batch.prompts,
        max_lag=config.prefetch.max_lag,
        updates=config.batch.updates,
        over_sampling=config.prefetch.over_sampling,
        extra=config.filtering.extra_prompts,
        last_step=config.steps,
    )
    with closing(workers):
        yield Prefetching(stream, workers, sieve_of(config), pace, teams, lambda: rollouts.engine.version)


def sieve_of(config: RunConfig) -> filters.Sieve:
    return filters.Sieve(
        overlong_of(config.filtering.overlong, config.rollout.max_new_tokens),
        tuple(map(filter_of, config.filtering.filters)),
    )


def overlong_of(given: schema.Mask | schema.SoftPenalty | None, longest: int) -> filters.Overlong:
    match given:
        case None:
            return filters.as_others
        case schema.Mask():
            return filters.masked
        case schema.SoftPenalty(buffer=buffer, weight=weight):
            return filters.SoftPenalty(longest, buffer, weight)


def filter_of(given: schema.NoSignal | schema.MeanScore | schema.Unfinished) -> filters.GroupFilter:
    match given:
        case schema.NoSignal():
            return filters.NoSignal()
        case schema.MeanScore(low=low, high=high):
            return filters.MeanScore(low, high)
        case schema.Unfinished(share=share):
            return filters.Unfinished(share)
