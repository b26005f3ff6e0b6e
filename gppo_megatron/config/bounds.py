"""What a single value may be, key by key; checks that need two values are in `checks`."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from gppo_megatron.config import schema
from gppo_megatron.config.problems import nearest, show
from gppo_megatron.objective.presets import DIVERGENCES, ESTIMATORS, PRESETS

Bound = Callable[[Any], str | None]
"""Says what is wrong with a value of the right type; None when nothing is."""


def _must(requirement: str, holds: Callable[[Any], bool]) -> Bound:
    return lambda value: None if holds(value) else f"must be {requirement} (got {show(value)})"


def _one_of(names: Iterable[str]) -> Bound:
    choices = tuple(names)
    requirement = f"must be one of {', '.join(choices)}"
    return lambda value: None if value in choices else f"{requirement} (got {show(value)}){nearest(value, choices)}"


COUNT = _must(">= 1", lambda value: value >= 1)
NOT_NEGATIVE = _must(">= 0", lambda value: value >= 0)
POSITIVE = _must("> 0", lambda value: value > 0)
SEED = _must(">= 0 and < 2**63", lambda value: 0 <= value < 2**63)
NOT_EMPTY = _must("some text", bool)
SHARE = _must("between 0 and 1, both excluded", lambda value: 0 < value < 1)
TEMPERATURE = _must(
    "> 0: at temperature 0 a sampled token has no log-probability to train on, greedy is not a training mode",
    lambda value: value > 0,
)

BOUNDS: dict[type, dict[str, Bound]] = {
    schema.TinyModel: {
        "alphabet": _must("at least one character, each only once", lambda text: 0 < len(text) == len(set(text))),
        "head_dim": _must("even and >= 2", lambda value: value >= 2 and value % 2 == 0),
        **dict.fromkeys(("hidden", "layers", "heads", "kv_heads", "ffn"), COUNT),
    },
    schema.HfModel: {"path": NOT_EMPTY},
    schema.Parallel: dict.fromkeys(("tensor", "pipeline", "data"), COUNT),
    schema.Optimizer: {
        "betas": _must("two numbers in [0, 1)", lambda betas: all(0 <= beta < 1 for beta in betas)),
        "decay_steps": COUNT,
        **dict.fromkeys(("lr", "eps"), POSITIVE),
        **dict.fromkeys(("min_lr", "warmup_steps", "weight_decay", "clip_grad"), NOT_NEGATIVE),
    },
    schema.Batch: {
        "group": _must(
            ">= 2: a group of 1 is its own baseline, so every advantage would be 0", lambda value: value >= 2
        ),
        **dict.fromkeys(("sequences", "updates", "micro_batch_tokens"), COUNT),
    },
    schema.Wandb: dict.fromkeys(("project", "name", "entity"), NOT_EMPTY),
    schema.ReasoningGymData: {
        "task": NOT_EMPTY,
        "prompt": NOT_EMPTY,
        "holdout": SHARE,
        "pool": _must(">= 2", lambda value: value >= 2),
        "threshold": _must("> 0 and <= 1", lambda value: 0 < value <= 1),
    },
    schema.FileData: {
        "columns": _must(
            "names of columns, for `prompt` and `answer`",
            lambda columns: set(columns) <= {"prompt", "answer"} and all(columns.values()),
        ),
        "max_prompt_tokens": COUNT,
        "holdout": SHARE,
        **dict.fromkeys(("path", "evaluation"), NOT_EMPTY),
    },
    schema.EmbeddedRollout: {"max_new_tokens": COUNT, "temperature": TEMPERATURE, "cache_tokens": COUNT},
    schema.Judge: {"timeout": POSITIVE, "workers": COUNT},
    schema.Objective: {
        "preset": _one_of(PRESETS),
        "divergence": _one_of(DIVERGENCES),
        "estimator": _one_of(ESTIMATORS),
        "ratio_cap": _must(">= 1", lambda value: value >= 1),
        "dual_clip": _must("> 1", lambda value: value > 1),
        "ratio_guard": _must("[low, high] with 0 < low < 1 < high", lambda guard: 0 < guard[0] < 1 < guard[1]),
        "length": COUNT,
        **dict.fromkeys(("delta", "delta_low", "delta_high"), POSITIVE),
    },
    schema.Warmup: dict.fromkeys(("steps", "sequences"), COUNT),
    schema.Evaluation: dict.fromkeys(("every", "prompts", "samples"), COUNT),
    schema.Save: {"every": NOT_NEGATIVE},
    schema.RunConfig: {"run": NOT_EMPTY, "steps": COUNT, "seed": SEED, "threads": COUNT},
}


def problem_with(owner: type, name: str, value: object) -> str | None:
    """What is wrong with `value` as the key `name` of the section `owner`; None when nothing is, or it is null."""
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        return f"must be finite (got {show(value)})"
    bound = BOUNDS.get(owner, {}).get(name)
    return bound(value) if bound is not None and value is not None else None
