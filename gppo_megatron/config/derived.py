"""What follows from a configuration: its objective in full, and the numbers printed before the start. No torch."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from gppo_megatron.config.architecture import Architecture, architecture_of
from gppo_megatron.config.layout import micro_batch_multiple
from gppo_megatron.config.schema import (
    EntropyBonus,
    MaskedSampling,
    OffPolicyRejection,
    ReferenceKl,
    RunConfig,
    SequenceRejection,
    TruncatedSampling,
)
from gppo_megatron.objective.presets import PRESETS, Advantage, Aggregation, Cell, Surrogate

TOP_TOKENS = 20
"""What inference engines report at most unless told otherwise."""


@dataclass(frozen=True)
class ResolvedObjective:
    """An objective with nothing left to look up. length: tokens, the constant of `constant_length`. topk: top tokens
    the sampler reports, 0 where the estimator reads none."""

    surrogate: Surrogate
    cell: Cell
    advantage: Advantage
    aggregation: Aggregation
    length: int
    ratio_cap: float | None
    dual_clip: float | None
    anchor: Literal["rollout", "recomputed"]
    corrections: tuple[TruncatedSampling | MaskedSampling | SequenceRejection | OffPolicyRejection, ...]
    auxiliary: tuple[ReferenceKl | EntropyBonus, ...]
    topk: int = 0
    routing: Literal["own", "replayed"] = "own"

    @property
    def sampled_top_tokens(self) -> int:
        """How many likeliest tokens the sampler reports: none where the policy scores its own."""
        return self.topk if self.anchor == "rollout" else 0

    def __str__(self) -> str:
        cell, deltas = self.cell, (self.cell.delta_low, self.cell.delta_high)
        parts = [
            f"{cell.divergence}{'' if cell.alpha is None else f'({cell.alpha:g})'} x {cell.estimator}"
            + (f" of {self.topk} tokens" if self.topk else "")
            + ("" if self.surrogate == "mask" else f" as {self.surrogate}"),
            f"thresholds {cell.delta_low:g} / {cell.delta_high:g}" if min(deltas) < math.inf else "no threshold",
        ]
        parts += [f"ratio guard {cell.ratio_guard[0]:g} to {cell.ratio_guard[1]:g}"] if cell.ratio_guard else []
        parts += [f"ratio cap {self.ratio_cap:g}"] if self.ratio_cap is not None else []
        parts += [f"dual clip {self.dual_clip:g}"] if self.dual_clip is not None else []
        length = f" {self.length}" if self.aggregation == "constant_length" else ""
        parts += [f"advantage {self.advantage}", f"{self.aggregation}{length}", f"anchor {self.anchor}"]
        parts += ["routing replayed"] if self.routing == "replayed" else []
        parts += [_in_words(section) for section in (*self.corrections, *self.auxiliary)]
        return ", ".join(parts)


@dataclass(frozen=True)
class Derived:
    """Counts for one rollout step unless said otherwise.

    update_sequences: sequences of one optimizer step; rank_sequences: those of one data-parallel rank.
    full_micro_batches: fewest micro-batches of a rank and optimizer step when every response has full length.
    sampled_tokens: the most a step can sample. optimizer_steps: of the whole run, supervised warm-up excluded.
    """

    prompts: int
    sequences: int
    update_sequences: int
    rank_sequences: int
    full_micro_batches: int
    sampled_tokens: int
    optimizer_steps: int
    processes: int
    parameters: int
    objective: ResolvedObjective


def resolve_objective(config: RunConfig) -> ResolvedObjective:
    """The preset with the run's changes. The configuration must have passed `checks.check`."""
    given = config.objective
    preset = PRESETS[given.preset]
    cell = preset.cell
    divergence = given.divergence or cell.divergence
    estimator = given.estimator or cell.estimator
    return ResolvedObjective(
        surrogate=given.surrogate or preset.surrogate,
        cell=Cell(
            divergence=divergence,
            estimator=estimator,
            delta_low=_first(given.delta_low, given.delta, cell.delta_low),
            delta_high=_first(given.delta_high, given.delta, cell.delta_high),
            alpha=(cell.alpha if given.alpha is None else given.alpha) if divergence == "alpha" else None,
            ratio_guard=given.ratio_guard or cell.ratio_guard,
        ),
        advantage=given.advantage or preset.advantage,
        aggregation=given.aggregation or preset.aggregation,
        length=given.length or config.rollout.max_new_tokens,
        ratio_cap=preset.ratio_cap if given.ratio_cap is None else given.ratio_cap,
        dual_clip=given.dual_clip,
        anchor=given.anchor,
        corrections=given.corrections,
        auxiliary=given.auxiliary,
        topk=(given.topk or TOP_TOKENS) if estimator == "topk" else 0,
        routing=given.routing,
    )


def derive(config: RunConfig) -> Derived:
    """The configuration must have passed `checks.check`."""
    batch, longest = config.batch, config.rollout.max_new_tokens
    rank_sequences = batch.sequences // batch.updates // config.parallel.data
    fewest = math.ceil(rank_sequences / (batch.micro_batch_tokens // (longest + 1)))
    multiple = micro_batch_multiple(config.parallel)
    return Derived(
        prompts=batch.prompts,
        sequences=batch.sequences,
        update_sequences=batch.sequences // batch.updates,
        rank_sequences=rank_sequences,
        full_micro_batches=math.ceil(fewest / multiple) * multiple,
        sampled_tokens=batch.sequences * longest,
        optimizer_steps=config.steps * batch.updates,
        processes=config.parallel.processes,
        parameters=count_parameters(architecture_of(config.model)),
        objective=resolve_objective(config),
    )


def describe(config: RunConfig) -> str:
    """The derived numbers in words, a line a topic, without a final newline."""
    derived, parallel, batch = derive(config), config.parallel, config.batch
    shape = architecture_of(config.model)
    warmup = config.warmup
    lines = (
        f"model      {shape.family}, {derived.parameters:,} parameters, {shape.layers} layers, "
        f"vocabulary {shape.vocab:,}",
        f"processes  {derived.processes} = tensor {parallel.tensor} x pipeline {parallel.pipeline} "
        f"x data {parallel.data} x context {parallel.context}, {config.device}, {config.precision}",
        f"rollout    {derived.sequences:,} sequences a step = {derived.prompts:,} prompts x {batch.group}, "
        f"at most {derived.sampled_tokens:,} sampled tokens",
        f"update     {batch.updates} optimizer steps a rollout, each on {derived.update_sequences:,} sequences, "
        f"{derived.rank_sequences:,} a data-parallel rank",
        f"           micro-batches of at most {batch.micro_batch_tokens:,} tokens: at least "
        f"{derived.full_micro_batches} a rank when all responses have full length",
        f"in all     {config.steps:,} rollouts, {derived.optimizer_steps:,} optimizer steps"
        + (f", after {warmup.steps:,} supervised ones on {warmup.sequences:,} sequences each" if warmup else ""),
        f"objective  {config.objective.preset}: {derived.objective}",
    )
    return "\n".join(lines)


def linear_work(shape: Architecture) -> int:
    """The length in tokens at which causal attention costs as much as a layer's matrices.

    A token costs 2 operations for each parameter of these, and on average 2 x (width of all heads) x length for those.
    """
    width = shape.heads * shape.head_dim
    matrices = shape.hidden * (2 * width + 2 * shape.kv_heads * shape.head_dim + 3 * shape.ffn)
    return max(1, matrices // width)


def count_parameters(shape: Architecture) -> int:
    """Weights of the model; tied embeddings count once."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    bias = shape.head_dim * (shape.heads + 2 * shape.kv_heads) if shape.qkv_bias else 0
    qk_norm = 2 * shape.head_dim if shape.qk_norm else 0
    layer = attention + bias + qk_norm + 2 * shape.hidden
    mlps = sum(_mlp_parameters(shape, number) for number in range(shape.layers))
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return shape.layers * layer + mlps + embeddings + shape.hidden


def _mlp_parameters(shape: Architecture, layer: int) -> int:
    count = shape.experts_in(layer)
    if shape.experts is None or not count:
        return 3 * shape.hidden * shape.ffn
    return count * 3 * shape.hidden * shape.experts.ffn + count * shape.hidden


def _in_words(section: Any) -> str:
    """A correction or a term: its kind, then its other values in their order."""
    values = [getattr(section, item.name) for item in fields(section) if item.name != "kind"]
    return " ".join([section.kind, *(value if isinstance(value, str) else f"{value:g}" for value in values)])


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
