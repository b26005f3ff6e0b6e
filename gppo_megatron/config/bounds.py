"""What a single value may be, key by key; checks that need two values are in `checks`."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from gppo_megatron.config import rollouts, schema, started
from gppo_megatron.config.problems import nearest, show
from gppo_megatron.objective.presets import DIVERGENCES, ESTIMATORS, PRESETS, TOKEN_ESTIMATORS

Bound = Callable[[Any], str | None]
"""Says what is wrong with a value of the right type; None when nothing is."""


def _must(requirement: str, holds: Callable[[Any], bool]) -> Bound:
    return lambda value: None if holds(value) else f"must be {requirement} (got {show(value)})"


def _one_of(names: Iterable[str]) -> Bound:
    choices = tuple(names)
    requirement = f"must be one of {', '.join(choices)}"
    return lambda value: None if value in choices else f"{requirement} (got {show(value)}){nearest(value, choices)}"


def _are_servers(urls: Sequence[str]) -> bool:
    found = [URL.fullmatch(url.lower()) for url in urls]
    ports = [int(each["port"] or 80) for each in found if each]
    each_once = len({url.lower().rstrip("/") for url in urls}) == len(urls)
    return bool(urls) and all(found) and each_once and all(0 < port < 65536 for port in ports)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://")) and bool(urlsplit(text).hostname)


COUNT = _must(">= 1", lambda value: value >= 1)
NOT_NEGATIVE = _must(">= 0", lambda value: value >= 0)
POSITIVE = _must("> 0", lambda value: value > 0)
SEED = _must(">= 0 and < 2**63", lambda value: 0 <= value < 2**63)
URL = re.compile(r"https?://[^\s/:]+(:(?P<port>\d+))?/?")
"""Without brackets, and so no address of IP version 6."""
NOT_EMPTY = _must("some text", bool)
SHARE = _must("between 0 and 1, both excluded", lambda value: 0 < value < 1)
TEMPERATURE = _must(
    "> 0: at temperature 0 a sampled token has no log-probability to train on, greedy is not a training mode",
    lambda value: value > 0,
)

SERVERS: dict[str, Bound] = {
    "temperature": TEMPERATURE,
    "urls": _must(
        "one or more addresses such as http://host:30000, each once",
        _are_servers,
    ),
    "router": _must("an address such as http://host:30000", lambda url: _are_servers((url,))),
    **dict.fromkeys(("max_new_tokens", "context", "requests"), COUNT),
    **dict.fromkeys(("stall_seconds", "recovery_seconds", "probe_tolerance"), POSITIVE),
}
"""Of every kind of rollout servers."""

STARTED: dict[str, Bound] = {
    "port": _must("between 1 and 65535", lambda value: 0 < value < 65536),
    "restarts": NOT_NEGATIVE,
    "restart_seconds": POSITIVE,
    "count": COUNT,
    "python": NOT_EMPTY,
}
"""Of every kind of servers that a run starts."""

BOUNDS: dict[type, dict[str, Bound]] = {
    schema.TinyModel: {
        "alphabet": _must("at least one character, each only once", lambda text: 0 < len(text) == len(set(text))),
        "head_dim": _must("even and >= 2", lambda value: value >= 2 and value % 2 == 0),
        "experts": NOT_NEGATIVE,
        **dict.fromkeys(("hidden", "layers", "heads", "kv_heads", "ffn", "experts_per_token", "expert_ffn"), COUNT),
    },
    schema.HfModel: {"path": NOT_EMPTY},
    schema.Parallel: dict.fromkeys(
        ("tensor", "pipeline", "data", "context", "virtual_stages", "expert", "expert_tensor"), COUNT
    ),
    schema.Fp8: dict.fromkeys(("first_layers", "last_layers"), NOT_NEGATIVE),
    schema.Memory: {"recompute_modules": _must("a module at least", bool), "recompute_layers": COUNT},
    schema.Optimizer: {
        "betas": _must("two numbers in [0, 1)", lambda betas: all(0 <= beta < 1 for beta in betas)),
        "decay_steps": COUNT,
        **dict.fromkeys(("lr", "eps"), POSITIVE),
        **dict.fromkeys(("min_lr", "warmup_steps", "weight_decay", "clip_grad", "max_skipped"), NOT_NEGATIVE),
    },
    schema.Batch: {
        "group": _must(
            ">= 2: a group of 1 is its own baseline, so every advantage would be 0", lambda value: value >= 2
        ),
        **dict.fromkeys(("sequences", "updates", "micro_batch_tokens"), COUNT),
    },
    schema.MeanScore: dict.fromkeys(("low", "high"), _must("between 0 and 1", lambda value: 0 <= value <= 1)),
    schema.Unfinished: {"share": _must(">= 0 and < 1", lambda value: 0 <= value < 1)},
    schema.SoftPenalty: {"buffer": COUNT, "weight": POSITIVE},
    schema.Filtering: {"extra_prompts": NOT_NEGATIVE},
    schema.Prefetch: dict.fromkeys(("max_lag", "over_sampling"), NOT_NEGATIVE),
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
    rollouts.EmbeddedRollout: {"max_new_tokens": COUNT, "temperature": TEMPERATURE, "cache_tokens": COUNT},
    rollouts.SglangRollout: {**SERVERS, "address": NOT_EMPTY},
    rollouts.VllmRollout: {
        **SERVERS,
        "sync": _must(
            "disk: vLLM's broadcast of weights is not built in here, and on a CPU it has none; or use kind: sglang",
            lambda value: value == "disk",
        ),
    },
    started.StartEmbedded: {name: bound for name, bound in STARTED.items() if name != "python"},
    started.StartSglang: STARTED,
    started.StartVllm: STARTED,
    schema.Judge: {"timeout": POSITIVE, "workers": COUNT},
    schema.LocalCode: {
        "workers": COUNT,
        "cpu_seconds": POSITIVE,
        "memory_mib": _must(">= 16: a Python needs some", lambda value: value >= 16),
    },
    schema.ServiceCode: {
        "urls": _must(
            "at least one URL such as http://node:8100, each only once",
            lambda urls: bool(urls) and len(set(urls)) == len(urls) and all(map(_is_url, urls)),
        ),
        "token_env": NOT_EMPTY,
        "attempts": COUNT,
        **dict.fromkeys(("request_seconds", "recovery_seconds"), POSITIVE),
    },
    schema.Objective: {
        "preset": _one_of(PRESETS),
        "divergence": _one_of(DIVERGENCES),
        "estimator": _one_of(ESTIMATORS),
        "topk": COUNT,
        "ratio_cap": _must(">= 1", lambda value: value >= 1),
        "dual_clip": _must("> 1", lambda value: value > 1),
        "ratio_guard": _must("[low, high] with 0 < low < 1 < high", lambda guard: 0 < guard[0] < 1 < guard[1]),
        "length": COUNT,
        "reference": NOT_EMPTY,
        **dict.fromkeys(("delta", "delta_low", "delta_high"), POSITIVE),
    },
    schema.TruncatedSampling: {"cap": POSITIVE},
    schema.MaskedSampling: {
        "low": _must("> 0 and < 1", lambda value: 0 < value < 1),
        "high": _must("> 1", lambda value: value > 1),
    },
    schema.SequenceRejection: {"limit": POSITIVE},
    schema.OffPolicyRejection: {"limit": POSITIVE},
    schema.ReferenceKl: {"coefficient": POSITIVE},
    schema.EntropyBonus: {"coefficient": POSITIVE},
    schema.Diagnostics: {
        "peak_tflops": POSITIVE,
        "estimators": _must(
            f"different ones of {', '.join(TOKEN_ESTIMATORS)}",
            lambda names: len(set(names)) == len(names) and set(names) <= set(TOKEN_ESTIMATORS),
        ),
        "thresholds": _must(
            "different numbers > 0",
            lambda numbers: len(set(numbers)) == len(numbers) and all(number > 0 for number in numbers),
        ),
        "exact_sample": NOT_NEGATIVE,
    },
    schema.Warmup: dict.fromkeys(("steps", "sequences"), COUNT),
    schema.Evaluation: dict.fromkeys(("every", "prompts", "samples"), COUNT),
    schema.Save: {
        "keep": COUNT,
        "grace": POSITIVE,
        **dict.fromkeys(("every", "checkpoint_every"), NOT_NEGATIVE),
    },
    schema.Watchdog: dict.fromkeys(("silence", "phase"), _must(">= 1", lambda value: value >= 1)),
    schema.GapAlarm: {"steps": COUNT, **dict.fromkeys(("mean", "largest"), POSITIVE)},
    schema.RunConfig: {"run": NOT_EMPTY, "steps": COUNT, "seed": SEED, "threads": COUNT},
}


def problem_with(owner: type, name: str, value: object) -> str | None:
    """What is wrong with `value` as the key `name` of the section `owner`; None when nothing is, or it is null."""
    numbers = value if isinstance(value, tuple) else (value,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        return f"must be finite (got {show(value)})"
    bound = BOUNDS.get(owner, {}).get(name)
    return bound(value) if bound is not None and value is not None else None
