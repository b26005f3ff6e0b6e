"""What `gppo eval` runs: the held-out problems of a run, answered by a stored model or by servers that are running."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from yaml import safe_load

from gppo_megatron.build import find_problems
from gppo_megatron.build_judge import open_judge
from gppo_megatron.build_rollout import open_running
from gppo_megatron.config.load import dump
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.data.model_folder import ModelFolder, open_folder
from gppo_megatron.evaluate.answers import ANSWERS, AnswerFile
from gppo_megatron.evaluate.checkpoint import Examination, table
from gppo_megatron.policy.megatron.platform import device_of
from gppo_megatron.policy.megatron.precision import DTYPES
from gppo_megatron.policy.megatron.stored_weights import side_folder, stored_weights
from gppo_megatron.rollout.collect import Collector
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.rollout.engine import Engine, Sampling
from gppo_megatron.run_folder import versions


@dataclass(frozen=True)
class Examined:
    """What is evaluated. identity: what tells it from any other, kept beside its answers."""

    engine: Engine
    identity: dict[str, Any]


def run_evaluation(
    config: RunConfig, model: Path, servers: Sequence[str], out: Path, samples: int, problems: int | None
) -> None:
    """Evaluate a model, in one process, on the run's held-out set with its sampling and its verifiers.

    model: a Hugging Face folder, or a distributed checkpoint such as those a run resumes from.
    servers: addresses of running servers to ask instead; `model` then gives the tokenizer alone.
    out: keeps every answer; a stopped evaluation goes on from there. problems: only the first so many.
    """
    model_folder = open_folder(side_folder(model))
    torch.set_num_threads(config.threads)
    found = find_problems(config, model_folder, speaks=True)
    prompts = found.heldout[:problems]
    resolved = safe_load(dump(config))
    settings = {key: resolved[key] for key in ("data", "rollout", "seed", "precision")}
    settings |= {"versions": versions(), "samples": samples, "problems": len(prompts)}
    rollout, tokenizer = config.rollout, model_folder.tokenizer
    sampling = Sampling(rollout.temperature, rollout.max_new_tokens, tokenizer.end_ids | found.stop_ids)
    opened = running(config, model_folder, servers) if servers else stored(config, model, model_folder)
    with opened as examined, closing(open_judge(config)) as judge:
        answers = AnswerFile(out, settings | examined.identity)
        collector = Collector(examined.engine, judge, sampling, tokenizer.decode, samples, config.seed)
        results = Examination(collector, prompts, tokenizer.decode, answers, say=print).run()
    print(f"{table(results)}\nevery answer is in {out / ANSWERS}", flush=True)


@contextmanager
def stored(config: RunConfig, model: Path, model_folder: ModelFolder) -> Iterator[Examined]:
    """The model in a folder, known by the sizes and times of its files."""
    device, dtype, shape = device_of(config.device), DTYPES[config.precision.dtype], model_folder.architecture
    files = sorted((*model.glob("*.safetensors"), *model.glob("*.distcp")))
    weights = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    engine = EmbeddedEngine(model_folder.path, dtype, device, cache_tokens=config.rollout.room.tokens)
    with stored_weights(model, shape, device, dtype, config.megatron) as tensors:
        engine.load(0, tensors)
    yield Examined(engine, {"model": str(model.resolve()), "weights": weights})


@contextmanager
def running(config: RunConfig, model_folder: ModelFolder, urls: Sequence[str]) -> Iterator[Examined]:
    """The model that servers hold, known by its checksums where they tell them, and by the name they give it."""
    room = min(config.rollout.room.tokens, model_folder.architecture.max_positions)
    with open_running(urls, model_folder.architecture.vocab, room) as served:
        yield Examined(served.fleet, {"model": sorted(urls), "weights": served.weights})
