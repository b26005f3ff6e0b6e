"""RunConfig -> running objects. The only place where a `kind:` or a mode chooses a class."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from gppo_verifiers.errors import WorkerStartError
from gppo_verifiers.pool import WorkerPool
from yaml import safe_load

from gppo_megatron.config.derived import resolve_objective
from gppo_megatron.config.load import dump
from gppo_megatron.config.schema import FileData, HfModel, ReasoningGymData, RunConfig, TinyModel, Warmup
from gppo_megatron.data.files.source import load_problems
from gppo_megatron.data.model_folder import ModelFolder, create_tiny, open_folder
from gppo_megatron.data.packing import Packer
from gppo_megatron.data.prompts import PromptStream
from gppo_megatron.data.reasoning_gym import draw_problems
from gppo_megatron.data.split import Problems, check_room
from gppo_megatron.errors import ConfigError, VerifierError
from gppo_megatron.evaluate.answers import ANSWERS, AnswerFile
from gppo_megatron.evaluate.checkpoint import Examination, table
from gppo_megatron.evaluate.held_out import Evaluate, Evaluation
from gppo_megatron.objective.advantages import ADVANTAGES
from gppo_megatron.objective.policy_gradient import MaximumLikelihood, PolicyGradient
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.observe.console import Console
from gppo_megatron.observe.jsonl import JsonLines
from gppo_megatron.observe.record import Record
from gppo_megatron.observe.report import write_html, write_png
from gppo_megatron.observe.sinks import Sink
from gppo_megatron.observe.tensorboard import TensorBoard
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.mapping.table import rules
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.platform import device_of
from gppo_megatron.policy.megatron.save import SaveHf
from gppo_megatron.policy.megatron.topology import MegatronTopology, topology
from gppo_megatron.policy.megatron.update import MegatronModel, MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.rollout.collect import Collector
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.rollout.engine import Sampling
from gppo_megatron.rollout.source import GivenAnswers, Synchronous
from gppo_megatron.train import Every, Run, train
from gppo_megatron.weight_sync.in_process import InProcess, Withheld

COLLECTIVE_TIMEOUT_SECONDS = 1800
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
METRICS, CONFIG, VERSIONS = "metrics.jsonl", "config.yaml", "versions.json"
CURVES, REPORT = "curves.png", "report.html"
NUMERICS = ("gppo-megatron", "torch", "megatron-core", "transformers", "math-verify", "sympy", "reasoning-gym")


def run_training(config: RunConfig) -> None:
    """Collective: the whole run, as one of its processes. `config` has passed its checks; the run folder is new."""
    device = device_of(config.device)
    torch.set_num_threads(config.threads)
    folder, rank = Path(config.run), int(os.environ.get("RANK", "0"))
    with ExitStack() as resources:
        resources.enter_context(new_run_folder(config, folder) if rank == 0 else nullcontext())
        # Joining the other processes waits for rank 0, so everyone finds the folder complete.
        teams = resources.enter_context(topology(config.parallel, device, config.seed, COLLECTIVE_TIMEOUT_SECONDS))
        judge = resources.enter_context(open_judge(config))
        model_folder = open_folder(model_path(config, folder))
        teams.world.gather(None)  # all have read the folder before a process may fail and remove it
        problems = find_problems(config, model_folder, speaks=rank == 0)
        sinks = open_sinks(config, folder) if rank == 0 else []
        builder = Builder(config, device, teams, model_folder, judge, problems, sinks)
        policy, evaluate = builder.run_stages()
        builder.saver(policy).write(folder / "hf")
    for sink in sinks:
        sink.close()
    if rank == 0:
        write_reports(config, folder, evaluate)


def run_evaluation(config: RunConfig, model: Path, out: Path, samples: int, problems: int | None) -> None:
    """Evaluate a Hugging Face folder, in one process, on the run's held-out set with its sampling and its verifiers.

    out: keeps every answer; a stopped evaluation goes on from there. problems: only the first so many.
    """
    device, model_folder, reader = device_of(config.device), open_folder(model), HfReader(model)
    torch.set_num_threads(config.threads)
    found = find_problems(config, model_folder, speaks=True)
    prompts = found.heldout[:problems]
    weights = {
        file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(model.glob("*.safetensors"))
    }
    resolved = safe_load(dump(config))
    settings = {key: resolved[key] for key in ("data", "rollout", "seed", "dtype")}
    settings |= {
        "versions": versions(),
        "model": str(model.resolve()),
        "weights": weights,
        "samples": samples,
        "problems": len(prompts),
    }
    answers = AnswerFile(out, settings)
    engine = EmbeddedEngine(model, DTYPES[config.dtype], device, cache_tokens=config.rollout.cache_tokens)
    names = (name for rule in rules(model_folder.architecture).values() for name in rule.hf)
    engine.load(0, ((name, reader.read(name)) for name in names))
    rollout, tokenizer = config.rollout, model_folder.tokenizer
    sampling = Sampling(rollout.temperature, rollout.max_new_tokens, tokenizer.end_ids | found.stop_ids)
    with open_judge(config) as judge:
        collector = Collector(engine, judge, sampling, tokenizer.decode, samples, config.seed)
        results = Examination(collector, prompts, tokenizer.decode, answers, say=print).run()
    print(f"{table(results)}\nevery answer is in {out / ANSWERS}", flush=True)


def open_judge(config: RunConfig) -> WorkerPool:
    """The verifiers' worker processes. Raises VerifierError where none can be started."""
    try:
        return WorkerPool(config.judge.workers, config.judge.timeout)
    except WorkerStartError as error:
        raise VerifierError(f"no verifier process can be started: {error}") from error


def model_path(config: RunConfig, folder: Path) -> Path:
    """Where the run's starting model lies."""
    match config.model:
        case TinyModel():
            return folder / "model"
        case HfModel(path=path):
            return Path(path)


@contextmanager
def new_run_folder(config: RunConfig, folder: Path) -> Iterator[None]:
    """The run's folder, which disappears again where the run ends, by an error or SIGTERM, before its first metrics.

    Until then it holds nothing worth keeping, and the repaired command must find its place free.
    Raises ConfigError where the folder cannot be made. Must be entered in the main thread.
    """
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"run folder {folder} cannot be made: {error.strerror}; choose another `run:`") from error

    def stop(number: int, frame: object) -> None:
        remove_unmeasured(folder)
        signal.signal(number, previous)
        os.kill(os.getpid(), number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        fill_run_folder(config, folder)
        yield
    finally:
        remove_unmeasured(folder)
        signal.signal(signal.SIGTERM, previous)


def remove_unmeasured(folder: Path) -> None:
    """Remove a run folder without a line of metrics."""
    metrics = folder / METRICS
    if not metrics.exists() or metrics.stat().st_size == 0:
        shutil.rmtree(folder)


def fill_run_folder(config: RunConfig, folder: Path) -> None:
    """The resolved configuration, the packages' versions, and the model when it is to be made."""
    (folder / CONFIG).write_text(dump(config), encoding="utf-8")
    (folder / VERSIONS).write_text(json.dumps(versions(), indent=1), encoding="utf-8")
    if isinstance(config.model, TinyModel):
        create_tiny(config.model, folder / "model", config.seed)


def versions() -> dict[str, str]:
    """The packages that a run's numbers depend on, verifiers included."""
    return {package: metadata.version(package) for package in NUMERICS}


def find_problems(config: RunConfig, model_folder: ModelFolder, speaks: bool) -> Problems:
    """What the run trains and is evaluated on. speaks: whether to print what was found out about it."""
    match config.data:
        case ReasoningGymData() as data:
            problems = draw_problems(data, model_folder.tokenizer)
        case FileData() as data:
            problems = load_problems(data, model_folder.tokenizer, say=print if speaks else lambda line: None)
    rooms = {
        "the model's positions": model_folder.architecture.max_positions,
        "rollout.cache_tokens": config.rollout.cache_tokens,
        "batch.micro_batch_tokens": config.batch.micro_batch_tokens,
    }
    check_room(problems, config.rollout.max_new_tokens, rooms)
    return problems


def open_sinks(config: RunConfig, folder: Path) -> list[Sink]:
    """Where rank 0 writes metrics."""
    steps = {"warmup": config.warmup.steps if config.warmup else 0, "train": config.steps}
    sinks: list[Sink] = [JsonLines(folder / METRICS), TensorBoard(folder / "tensorboard"), Console(sys.stdout, steps)]
    return [*sinks, *wandb_sinks(config, folder)]


def wandb_sinks(config: RunConfig, folder: Path) -> Iterator[Sink]:
    """The Weights & Biases sink, where the run asks for it. Raises ConfigError where the package is missing."""
    if config.wandb is None:
        return
    try:
        from gppo_megatron.observe.weights_and_biases import WeightsAndBiases
    except ModuleNotFoundError as error:
        raise ConfigError("wandb: the package is not installed; pip install 'gppo-megatron[wandb]'") from error
    yield WeightsAndBiases(config.wandb, folder, safe_load(dump(config)))


def write_reports(config: RunConfig, folder: Path, evaluate: Evaluate) -> None:
    """The picture and the page of the whole run."""
    write_png(folder / METRICS, folder / CURVES)
    write_html(folder / METRICS, folder / REPORT, config.run, dump(config), evaluate.samples)
    print(f"wrote {folder / REPORT}, {folder / CURVES} and the trained model {folder / 'hf'}", flush=True)


@dataclass(frozen=True)
class Builder:
    """What the stages of a run share."""

    config: RunConfig
    device: torch.device
    teams: MegatronTopology
    model_folder: ModelFolder
    judge: WorkerPool
    problems: Problems
    sinks: Sequence[Sink]

    def run_stages(self) -> tuple[MegatronPolicy, Evaluate]:
        """Collective: train every stage in turn; each one's optimizer is built when its stage begins."""
        model = self.load_model()
        engine = EmbeddedEngine(
            self.model_folder.path, self.dtype, self.device, cache_tokens=self.config.rollout.cache_tokens
        )
        evaluate = self.evaluation(engine)
        version = 0
        for warmup in self.warmups():
            policy = MegatronPolicy(model, warmup.optimizer, warmup.steps)
            train(self.supervised(policy, warmup))
            version = policy.version
        steps = self.config.steps * self.config.batch.updates
        policy = MegatronPolicy(model, self.config.optimizer, steps, version)
        train(self.reinforcement(policy, engine, evaluate))
        return policy, evaluate

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.dtype]

    def warmups(self) -> Iterator[Warmup]:
        if self.config.warmup is not None:
            yield self.config.warmup

    def load_model(self) -> MegatronModel:
        """Collective: this process's part of the model, filled from the model folder."""
        architecture, parallel = self.model_folder.architecture, self.config.parallel
        megatron = transformer_config(architecture, parallel, self.device, self.dtype, self.config.megatron)
        chunks = build_model(megatron, architecture, self.device)
        load(chunks, architecture, HfReader(self.model_folder.path))
        return loaded_model(chunks, architecture, self.config.rollout.temperature, self.device)

    def supervised(self, policy: MegatronPolicy, warmup: Warmup) -> Run:
        """Cold start: the reference answers, as an objective over given trajectories."""
        return Run(
            steps=warmup.steps,
            policy=policy,
            objective=MaximumLikelihood(),
            rollouts=GivenAnswers(
                PromptStream(self.problems.train, self.config.seed), warmup.sequences, self.teams.data
            ),
            advantage=lambda rewards: rewards,
            packer=Packer(1, self.config.batch.micro_batch_tokens, "token_mean", None, self.teams.data),
            scorers=(),
            sync=Withheld(),
            at_start=(),
            after_step=(Record(self.teams.world, "warmup", self.sinks),),
        )

    def reinforcement(self, policy: MegatronPolicy, engine: EmbeddedEngine, evaluate: Evaluate) -> Run:
        """GPPO on sampled, judged answers."""
        config, resolved = self.config, resolve_objective(self.config)
        record = Record(self.teams.world, "train", self.sinks)
        save_every = config.save.every or config.steps + 1
        return Run(
            steps=config.steps,
            policy=policy,
            objective=PolicyGradient(TrustRegion(resolved.cell), resolved.ratio_cap, resolved.dual_clip),
            rollouts=Synchronous(
                stream=PromptStream(self.problems.train, config.seed),
                collector=self.collector(engine, config.batch.group, config.seed),
                prompts_per_step=config.batch.prompts,
                data=self.teams.data,
                replica=self.teams.replica,
            ),
            advantage=ADVANTAGES[resolved.advantage],
            packer=Packer(
                updates=config.batch.updates,
                micro_batch_tokens=config.batch.micro_batch_tokens,
                aggregation=resolved.aggregation,
                constant_length=resolved.length,
                data_team=self.teams.data,
            ),
            scorers=(policy.annotate,) if resolved.anchor == "recomputed" else (),
            sync=InProcess(engine),
            at_start=(evaluate, record),
            after_step=(
                Every(config.evaluation.every, config.steps, evaluate),
                Every(save_every, save_every, self.saver(policy)),
                record,
            ),
        )

    def collector(self, engine: EmbeddedEngine, group_size: int, seed: int) -> Collector:
        rollout, tokenizer = self.config.rollout, self.model_folder.tokenizer
        stop_ids = tokenizer.end_ids | self.problems.stop_ids
        sampling = Sampling(rollout.temperature, rollout.max_new_tokens, stop_ids)
        return Collector(engine, self.judge, sampling, tokenizer.decode, group_size, seed)

    def evaluation(self, engine: EmbeddedEngine) -> Evaluate:
        config = self.config.evaluation
        collector = self.collector(engine, config.samples, self.config.seed)
        prompts = self.problems.heldout[: config.prompts]
        return Evaluate(Evaluation(collector, prompts, self.model_folder.tokenizer.decode, self.teams.world))

    def saver(self, policy: MegatronPolicy) -> SaveHf:
        return SaveHf(policy, Path(self.config.run), self.model_folder.path, self.teams.world)
