"""What follows from a configuration: its objective in full, and the numbers printed before the start. No torch."""

import math
from dataclasses import dataclass
from typing import Literal

from gppo_megatron.config.architecture import Architecture, architecture_of
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.objective.presets import PRESETS, Advantage, Aggregation, Cell


@dataclass(frozen=True)
class ResolvedObjective:
    """An objective with nothing left to look up. length: tokens, the constant of `constant_length`."""

    cell: Cell
    advantage: Advantage
    aggregation: Aggregation
    length: int
    ratio_cap: float | None
    dual_clip: float | None
    anchor: Literal["rollout", "recomputed"]

    def __str__(self) -> str:
        cell = self.cell
        parts = [
            f"{cell.divergence}{'' if cell.alpha is None else f'({cell.alpha:g})'} x {cell.estimator}",
            f"thresholds {cell.delta_low:g} / {cell.delta_high:g}",
        ]
        parts += [f"ratio guard {cell.ratio_guard[0]:g} to {cell.ratio_guard[1]:g}"] if cell.ratio_guard else []
        parts += [f"ratio cap {self.ratio_cap:g}"] if self.ratio_cap is not None else []
        parts += [f"dual clip {self.dual_clip:g}"] if self.dual_clip is not None else []
        length = f" {self.length}" if self.aggregation == "constant_length" else ""
        parts += [f"advantage {self.advantage}", f"{self.aggregation}{length}", f"anchor {self.anchor}"]
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
    return ResolvedObjective(
        cell=Cell(
            divergence=divergence,
            estimator=given.estimator or cell.estimator,
            delta_low=_first(given.delta_low, given.delta, cell.delta_low),
            delta_high=_first(given.delta_high, given.delta, cell.delta_high),
            alpha=(cell.alpha if given.alpha is None else given.alpha) if divergence == "alpha" else None,
            ratio_guard=given.ratio_guard or cell.ratio_guard,
        ),
        advantage=given.advantage or preset.advantage,
        aggregation=given.aggregation or preset.aggregation,
        length=given.length or config.rollout.max_new_tokens,
        ratio_cap=given.ratio_cap,
        dual_clip=given.dual_clip,
        anchor=given.anchor,
    )


def derive(config: RunConfig) -> Derived:
    """The configuration must have passed `checks.check`."""
    batch, longest = config.batch, config.rollout.max_new_tokens
    rank_sequences = batch.sequences // batch.updates // config.parallel.data
    return Derived(
        prompts=batch.prompts,
        sequences=batch.sequences,
        update_sequences=batch.sequences // batch.updates,
        rank_sequences=rank_sequences,
        full_micro_batches=math.ceil(rank_sequences / (batch.micro_batch_tokens // (longest + 1))),
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
        f"x data {parallel.data}, {config.device}, {config.dtype}",
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


def count_parameters(shape: Architecture) -> int:
    """Weights of the model; tied embeddings count once."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    bias = shape.head_dim * (shape.heads + 2 * shape.kv_heads) if shape.qkv_bias else 0
    qk_norm = 2 * shape.head_dim if shape.qk_norm else 0
    layer = attention + bias + qk_norm + 3 * shape.hidden * shape.ffn + 2 * shape.hidden
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return shape.layers * layer + embeddings + shape.hidden


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
