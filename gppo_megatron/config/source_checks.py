"""Checks of `filtering:` and `prefetch:` that need more than one key. No torch."""

from collections.abc import Iterator

from gppo_megatron.config.rollouts import EmbeddedRollout
from gppo_megatron.config.schema import MeanScore, RunConfig, SoftPenalty
from gppo_megatron.objective.presets import PRESETS


def source_problems(config: RunConfig) -> Iterator[str]:
    yield from _group_problems(config)
    yield from _prefetch_problems(config)


def _group_problems(config: RunConfig) -> Iterator[str]:
    filtering, longest = config.filtering, config.rollout.max_new_tokens
    if isinstance(filtering.overlong, SoftPenalty) and filtering.overlong.buffer >= longest:
        yield (
            f"filtering.overlong.buffer: must be less than rollout.max_new_tokens = {longest}, below which it lies "
            f"(got {filtering.overlong.buffer})"
        )
    kinds = [each.kind for each in filtering.filters]
    for place, each in enumerate(filtering.filters):
        if each.kind in kinds[:place]:
            yield f"filtering.filters[{place}].kind: {each.kind!r} is there already; each kind may stand once"
        if isinstance(each, MeanScore) and each.low > each.high:
            yield f"filtering.filters[{place}].low: must not exceed high = {each.high} (got {each.low})"
    if filtering.extra_prompts and not filtering.filters:
        yield (
            f"filtering.extra_prompts: takes the place of filtered groups, but filtering.filters is empty; add a "
            f"filter such as {{kind: no_signal}}, or leave it at 0 (got {filtering.extra_prompts})"
        )


def _prefetch_problems(config: RunConfig) -> Iterator[str]:
    prefetch, objective = config.prefetch, config.objective
    if isinstance(config.rollout, EmbeddedRollout):
        for name, value in (("max_lag", prefetch.max_lag), ("over_sampling", prefetch.over_sampling)):
            if value:
                yield (
                    f"prefetch.{name}: needs rollout servers, but rollout.kind is 'embedded', which samples in the "
                    f"trainer's own processes; choose another kind, or leave it at 0 (got {value})"
                )
    if not prefetch.max_lag:
        return
    estimator = objective.estimator or PRESETS[objective.preset].cell.estimator
    if objective.anchor == "rollout" and estimator == "exact":
        yield (
            "prefetch.max_lag: the estimator 'exact' needs the distributions of the weights that sampled, which the "
            f"trainer no longer has; set objective.anchor: recomputed with a correction, or max_lag: 0 "
            f"(got {prefetch.max_lag})"
        )
    if objective.anchor == "rollout" and config.diagnostics.exact_sample:
        yield (
            "prefetch.max_lag: diagnostics.exact_sample needs the distributions of the weights that sampled, which the "
            f"trainer no longer has; set diagnostics.exact_sample: 0, objective.anchor: recomputed, or max_lag: 0 "
            f"(got {prefetch.max_lag})"
        )
    if objective.anchor == "recomputed" and not {"tis", "mis"} & {each.kind for each in objective.corrections}:
        yield (
            "prefetch.max_lag: with objective.anchor: recomputed the ratio leaves out that older weights sampled the "
            "tokens; add {kind: tis} or {kind: mis} to objective.corrections, or set objective.anchor: rollout "
            f"(got {prefetch.max_lag})"
        )
