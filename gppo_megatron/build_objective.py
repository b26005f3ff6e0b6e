"""The `objective:` of a run -> the object it means; `build`'s part for losses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gppo_megatron.config import schema
from gppo_megatron.config.derived import ResolvedObjective
from gppo_megatron.objective.auxiliary import EntropyBonus, ReferenceKl, WithTerms
from gppo_megatron.objective.corrections import (
    Corrected,
    Corrector,
    MaskedSampling,
    OffPolicyRejection,
    SequenceRejection,
    TruncatedSampling,
)
from gppo_megatron.objective.diagnostics import (
    BoundTerms,
    Diagnosed,
    Disagreement,
    Estimates,
    MaskedShares,
    OfHead,
    Probe,
    of_region,
    of_sample,
)
from gppo_megatron.objective.penalties import PenalizedGradient
from gppo_megatron.objective.policy_gradient import Objective, PolicyGradient
from gppo_megatron.objective.presets import Cell
from gppo_megatron.objective.sequence import GeometricMean, SequenceRatio
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.observe.gap_alarm import GapAlarm
from gppo_megatron.types import Team

GAP_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats a token on average: a hundred times what rounding makes of equal weights, or more."""
REFERENCE = "reference"
"""The reference policy's folder, in the run's."""


def objective_of(resolved: ResolvedObjective) -> Objective:
    """The loss a token that a run's `objective:` means: its surrogate, corrected, and with terms added."""
    objective = surrogate_of(resolved)
    if resolved.corrections:
        objective = Corrected(objective, tuple(map(corrector_of, resolved.corrections)))
    if resolved.auxiliary:
        objective = WithTerms(objective, tuple(map(term_of, resolved.auxiliary)))
    return objective


def diagnosed(objective: Objective, resolved: ResolvedObjective, given: schema.Diagnostics) -> Objective:
    """`objective` with what `diagnostics:` asks for among its metrics."""
    cell = resolved.cell
    of_head = divergences_of_head(cell, given)
    probes: list[Probe] = []
    if given.estimators:
        probes.append(Estimates(given.estimators, given.thresholds, tuple(of_head.items())))
    if given.masked:
        probes.append(MaskedShares())
    if given.bound:
        probes.append(BoundTerms())
    if "exact" in of_head:
        regions = {name: TrustRegion(replace(cell, estimator=name)) for name in (*given.estimators, "exact")}
        probes += [Disagreement(name, regions[name], regions["exact"], of_head["exact"]) for name in given.estimators]
    return Diagnosed(objective, TrustRegion(cell).generator, tuple(probes))


def divergences_of_head(cell: Cell, given: schema.Diagnostics) -> dict[str, OfHead]:
    """By the estimator's name: what the head works out for the trust region, and the sample beside it."""
    found: dict[str, OfHead] = {cell.estimator: of_region} if cell.from_head else {}
    return found | {"exact": of_sample} if given.exact_sample else found


def gap_alarm(config: schema.RunConfig, world: Team) -> GapAlarm:
    """What watches over the gap between sampler and trainer."""
    given = config.gap_alarm
    mean = GAP_LIMITS[config.precision.dtype] if given.mean is None else given.mean
    limits = {"policy/sampler_gap": mean}
    limits |= {} if given.largest is None else {"policy/sampler_gap_max": given.largest}
    return GapAlarm(world, limits, given.steps, given.action)


def surrogate_of(resolved: ResolvedObjective) -> Objective:
    region = TrustRegion(resolved.cell)
    match resolved.surrogate:
        case "mask":
            return PolicyGradient(region, resolved.ratio_cap, resolved.dual_clip)
        case "penalty":
            return PenalizedGradient(resolved.cell)
        case "sequence_mask":
            return SequenceRatio(PolicyGradient(region, resolved.ratio_cap, resolved.dual_clip))
        case "geometric_mean":
            return GeometricMean(region, resolved.ratio_cap)


def corrector_of(
    given: schema.TruncatedSampling | schema.MaskedSampling | schema.SequenceRejection | schema.OffPolicyRejection,
) -> Corrector:
    match given:
        case schema.TruncatedSampling(level=level, cap=cap):
            return TruncatedSampling(level, cap)
        case schema.MaskedSampling(level=level, low=low, high=high):
            return MaskedSampling(level, low, high)
        case schema.SequenceRejection(limit=limit, statistic=statistic):
            return SequenceRejection(statistic, limit)
        case schema.OffPolicyRejection(limit=limit):
            return OffPolicyRejection(limit)


def term_of(given: schema.ReferenceKl | schema.EntropyBonus) -> Objective:
    match given:
        case schema.ReferenceKl(coefficient=coefficient, estimator=estimator):
            return ReferenceKl(coefficient, estimator)
        case schema.EntropyBonus(coefficient=coefficient):
            return EntropyBonus(coefficient)


def reference_folder(config: schema.RunConfig, start: Path, world: Team, write: Callable[[Path], None]) -> Path:
    """Collective: the model folder of the reference policy.

    start: of the run's starting model. write: collective, saves the policy to a folder: done once, where the reference
    is the policy of the warm-up's end. A run that goes on later finds it there, and does not take its policy of then.
    """
    if config.objective.reference is not None:
        return Path(config.objective.reference)
    if config.warmup is None:
        return start
    folder = Path(config.run) / REFERENCE
    if not world.gather(folder.exists())[0]:
        write(folder)
        world.gather(None)  # written before anyone reads it
    return folder
