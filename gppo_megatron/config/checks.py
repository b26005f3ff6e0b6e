"""Checks that need more than one key, the model's architecture, or the machine. No torch."""

import glob
import math
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from gppo_megatron.config.architecture import Architecture, architecture_of
from gppo_megatron.config.bounds import problem_with
from gppo_megatron.config.expert_layout import expert_problems
from gppo_megatron.config.layout import layout_problems
from gppo_megatron.config.model_folder import folder_problems
from gppo_megatron.config.number_checks import number_problems
from gppo_megatron.config.problems import config_error, show
from gppo_megatron.config.rollouts import VllmRollout
from gppo_megatron.config.schema import (
    FileData,
    HfModel,
    Objective,
    Optimizer,
    ReferenceKl,
    RunConfig,
    ServiceCode,
    TinyModel,
)
from gppo_megatron.config.server_checks import server_problems
from gppo_megatron.config.source_checks import source_problems
from gppo_megatron.errors import ConfigError
from gppo_megatron.objective.presets import ESTIMATORS, PRESETS, Surrogate


def check(config: RunConfig, source: str = "configuration") -> None:
    """Raises one ConfigError, headed by `source`, that lists every reason why this run cannot work."""
    problems = list(_bound_problems(config, ""))
    if not problems:  # what follows divides by these numbers and looks these names up
        problems = [*_batch_problems(config), *_schedule_problems(config), *_objective_problems(config)]
        problems += [*server_problems(config), *source_problems(config), *_data_problems(config)]
        problems += [*_judge_problems(config), *_model_problems(config)]
    if problems:
        raise config_error(source, problems)


def check_run_folder(config: RunConfig, resume: bool = False) -> None:
    """Raises ConfigError when the run's folder exists, unless it is to `resume`: nothing is overwritten or mixed."""
    folder = Path(config.run)
    if not resume and folder.exists():
        raise ConfigError(
            f"run folder {folder} exists already; choose another `run:`, remove it, or go on with that run: --resume"
        )


def check_world(config: RunConfig, world_size: int) -> None:
    """Raises ConfigError unless `world_size`, the processes that were started, is what the run needs."""
    needed = config.parallel.processes
    if world_size != needed:
        raise ConfigError(
            f"this run needs parallel.tensor x pipeline x data x context = {needed} process{'es' * (needed > 1)}, "
            f"but {world_size} {'were' if world_size > 1 else 'was'} started; start {needed}, or change parallel"
        )


def _bound_problems(section: Any, prefix: str) -> Iterator[str]:
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield from _bound_problems(value, f"{prefix}{item.name}.")
        elif isinstance(value, tuple) and any(map(is_dataclass, value)):
            for place, entry in enumerate(value):
                yield from _bound_problems(entry, f"{prefix}{item.name}[{place}].")
        elif (problem := problem_with(type(section), item.name, value)) is not None:
            yield f"{prefix}{item.name}: {problem}"


def _batch_problems(config: RunConfig) -> Iterator[str]:
    batch, data = config.batch, config.parallel.data
    if batch.sequences % batch.group or batch.sequences % (batch.updates * data):
        yield (
            f"batch.sequences: must be divisible by batch.group = {batch.group} and by batch.updates x parallel.data "
            f"= {batch.updates} x {data} = {batch.updates * data} (got {batch.sequences}); "
            + _nearest_multiples(batch.sequences, math.lcm(batch.group, batch.updates * data))
        )
    if config.warmup is not None and config.warmup.sequences % data:
        yield (
            f"warmup.sequences: must be divisible by parallel.data = {data} (got {config.warmup.sequences}); "
            + _nearest_multiples(config.warmup.sequences, data)
        )
    tokens = config.rollout.max_new_tokens
    for name, room in (
        ("batch.micro_batch_tokens", batch.micro_batch_tokens),
        config.rollout.room,
    ):
        if tokens >= room:
            yield f"{name}: must exceed rollout.max_new_tokens = {tokens}, to leave room for a prompt (got {room})"


def _nearest_multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit} would do" if below else f"{unit} would do"


def _data_problems(config: RunConfig) -> Iterator[str]:
    data = config.data
    if not isinstance(data, FileData):
        return
    paths = {"path": data.path} | ({"evaluation": data.evaluation} if data.evaluation is not None else {})
    for name, path in paths.items():
        if not Path(path).exists() and not glob.glob(path, recursive=True):
            yield f"data.{name}: no such file or folder, and no file matches it as a pattern (got {path!r})"
    if data.evaluation is None:
        for name, given in (("adapter", data.evaluation_adapter), ("repeats", data.evaluation_repeats)):
            if given:
                yield f"data.evaluation_{name}: used with data.evaluation alone, but that is null"
    needed = data.max_prompt_tokens + config.rollout.max_new_tokens
    for name, room in (
        ("batch.micro_batch_tokens", config.batch.micro_batch_tokens),
        config.rollout.room,
    ):
        if needed > room:
            yield (
                f"{name}: must hold a prompt of data.max_prompt_tokens = {data.max_prompt_tokens} and a response of "
                f"rollout.max_new_tokens = {config.rollout.max_new_tokens}, {needed} in all (got {room})"
            )


def _judge_problems(config: RunConfig) -> Iterator[str]:
    code = config.judge.code
    if isinstance(code, ServiceCode) and code.token_env is not None and not os.environ.get(code.token_env):
        yield f"judge.code.token_env: the environment has no {code.token_env}; set it to the services' token"


def _schedule_problems(config: RunConfig) -> Iterator[str]:
    stages = [("optimizer", config.optimizer, config.steps * config.batch.updates)]
    if config.warmup is not None:
        stages.append(("warmup.optimizer", config.warmup.optimizer, config.warmup.steps))
    for name, optimizer, steps in stages:
        yield from _optimizer_problems(name, optimizer, steps)


def _optimizer_problems(name: str, optimizer: Optimizer, steps: int) -> Iterator[str]:
    if optimizer.min_lr > optimizer.lr:
        yield f"{name}.min_lr: must not exceed {name}.lr = {optimizer.lr} (got {optimizer.min_lr})"
    decay = optimizer.decay_steps or steps
    if optimizer.warmup_steps >= decay:
        end = "decay_steps" if optimizer.decay_steps else "the stage's optimizer steps"
        yield f"{name}.warmup_steps: must be less than {end} = {decay} (got {optimizer.warmup_steps})"


def _objective_problems(config: RunConfig) -> Iterator[str]:
    objective = config.objective
    preset = PRESETS[objective.preset]
    if objective.delta is not None and not (objective.delta_low is objective.delta_high is None):
        yield "objective.delta: sets both sides, so it cannot stand together with delta_low or delta_high"
    divergence = objective.divergence or preset.cell.divergence
    if divergence == "alpha" and objective.alpha is None and preset.cell.alpha is None:
        yield "objective.alpha: required for the divergence 'alpha'"
    if divergence != "alpha" and objective.alpha is not None:
        yield f"objective.alpha: used by the divergence 'alpha' alone, but this run's is {divergence!r}"
    yield from _surrogate_problems(config)
    yield from _term_problems(objective)
    yield from _sample_problems(config)
    estimator = objective.estimator or preset.cell.estimator
    if estimator != "topk" and objective.topk is not None:
        yield (
            f"objective.topk: used by the estimator 'topk' alone, but this run's is {estimator!r}; "
            "remove it, or set objective.estimator: topk"
        )
    if objective.routing == "replayed" and isinstance(config.rollout, VllmRollout):
        yield (
            "objective.routing: 'replayed' needs the experts that the sampler sent each token to, which rollout.kind = "
            f"{config.rollout.kind!r} does not report; set objective.routing: own, or rollout.kind: embedded or sglang"
        )
    aggregation = objective.aggregation or preset.aggregation
    if objective.length is not None and aggregation != "constant_length":
        yield f"objective.length: used by the aggregation 'constant_length' alone, but this run's is {aggregation!r}"


SURROGATE_LIMITS: dict[Surrogate, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mask": (ESTIMATORS, ()),
    "penalty": (("mc", "atomic"), ("ratio_cap", "dual_clip", "ratio_guard")),
    "sequence_mask": (("mc",), ()),
    "geometric_mean": (("mc",), ("dual_clip", "ratio_guard")),
}
"""surrogate -> the estimators it can use, and the keys that mean nothing with it."""


def _surrogate_problems(config: RunConfig) -> Iterator[str]:
    objective, preset = config.objective, PRESETS[config.objective.preset]
    surrogate = objective.surrogate or preset.surrogate
    estimators, unused = SURROGATE_LIMITS[surrogate]
    estimator = objective.estimator or preset.cell.estimator
    if estimator not in estimators:
        choices = " or ".join(estimators)
        yield f"objective.estimator: must be {choices} with the surrogate {surrogate!r} (got {estimator!r})"
    limits = {
        "ratio_cap": preset.ratio_cap if objective.ratio_cap is None else objective.ratio_cap,
        "dual_clip": objective.dual_clip,
        "ratio_guard": objective.ratio_guard or preset.cell.ratio_guard,
    }
    for name in unused:
        if limits[name] is not None:
            yield f"objective.{name}: means nothing with the surrogate {surrogate!r} (got {show(limits[name])})"


def _sample_problems(config: RunConfig) -> Iterator[str]:
    """Of the exact divergence beside another estimator."""
    objective, preset, given = config.objective, PRESETS[config.objective.preset], config.diagnostics
    surrogate = objective.surrogate or preset.surrogate
    if not given.exact_sample:
        return
    if (objective.estimator or preset.cell.estimator) == "exact":
        yield (
            "diagnostics.exact_sample: the objective's estimator 'exact' works the divergence of every token out; "
            f"set it to 0 (got {given.exact_sample})"
        )
    if surrogate != "mask":
        yield (
            "diagnostics.exact_sample: compares which tokens a trust region masks one by one, but the surrogate is "
            f"{surrogate!r}; set it to 0, or set objective.surrogate: mask (got {given.exact_sample})"
        )
    if not given.estimators:
        yield (
            "diagnostics.exact_sample: compares diagnostics.estimators with the exact divergence, but there are none; "
            f"set it to 0, or name some (got {given.exact_sample})"
        )


def _term_problems(objective: Objective) -> Iterator[str]:
    """Of corrections, auxiliary terms and the reference."""
    for name, sections in (("corrections", objective.corrections), ("auxiliary", objective.auxiliary)):
        kinds = [section.kind for section in sections]
        for place, kind in enumerate(kinds):
            if kind in kinds[:place]:
                yield f"objective.{name}[{place}].kind: {kind!r} is there already; each kind may stand once"
            if kind in {"tis", "mis", "reject"} and objective.anchor != "recomputed":
                yield (
                    f"objective.{name}[{place}]: {kind!r} compares the anchor with the sampler, which are the same "
                    f"with objective.anchor: {objective.anchor}; set it to recomputed, or leave the correction out"
                )
    if objective.reference is None:
        return
    if not any(isinstance(section, ReferenceKl) for section in objective.auxiliary):
        yield "objective.reference: used by a term of the kind 'kl' in objective.auxiliary alone, but there is none"
    elif not Path(objective.reference).is_dir():
        yield f"objective.reference: no such folder (got {objective.reference!r})"


def _model_problems(config: RunConfig) -> list[str]:
    try:
        shape = architecture_of(config.model)
    except ConfigError as error:
        return [f"model: {error}"]
    problems = list(_shape_problems(config, shape))
    match config.model:
        case HfModel(path=path):
            problems += [f"model.path: {problem}" for problem in folder_problems(Path(path), shape.vocab)]
        case TinyModel():
            pass  # its folder is written by the run itself
    return problems


def _shape_problems(config: RunConfig, shape: Architecture) -> Iterator[str]:
    if shape.heads % shape.kv_heads:
        yield f"model: its {shape.heads} heads must be divisible by its {shape.kv_heads} kv_heads"
    yield from layout_problems(config, shape)
    yield from expert_problems(config.parallel, shape)
    yield from number_problems(config, shape)
    if config.objective.routing == "replayed" and shape.experts is None:
        yield "objective.routing: the model has no experts to send tokens to (got 'replayed'); own would do"
    yield from _length_problems(config, shape)


def _length_problems(config: RunConfig, shape: Architecture) -> Iterator[str]:
    longest = config.rollout.max_new_tokens
    if longest >= shape.max_positions:
        yield (
            f"rollout.max_new_tokens: must be less than the model's {shape.max_positions} positions, "
            f"to leave room for a prompt (got {longest})"
        )
    elif isinstance(config.data, FileData) and config.data.max_prompt_tokens + longest > shape.max_positions:
        yield (
            f"data.max_prompt_tokens: must be at most {shape.max_positions - longest}, the model's "
            f"{shape.max_positions} positions less rollout.max_new_tokens (got {config.data.max_prompt_tokens})"
        )
