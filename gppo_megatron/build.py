"""RunConfig -> running objects. The only place where a `kind:` or a mode chooses a class."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from gppo_verifiers.types import Judge
from yaml import safe_load

from gppo_megatron.build_judge import open_judge
from gppo_megatron.build_objective import diagnosed, gap_alarm, objective_of, reference_folder
from gppo_megatron.build_rollout import Rollouts, open_rollouts
from gppo_megatron.build_source import open_source
from gppo_megatron.config import schema
from gppo_megatron.config.derived import ResolvedObjective, linear_work, resolve_objective
from gppo_megatron.config.layout import alignment, micro_batch_multiple, slices
from gppo_megatron.config.load import dump
from gppo_megatron.config.model_folder import model_path
from gppo_megatron.config.schema import (
    FileData,
    ReasoningGymData,
    RunConfig,
    Warmup,
)
from gppo_megatron.data.balance import PackedRoom, PaddedRoom, Room, Work
from gppo_megatron.data.files.source import load_problems
from gppo_megatron.data.model_folder import ModelFolder, open_folder
from gppo_megatron.data.packing import Packer
from gppo_megatron.data.prompts import PromptStream
from gppo_megatron.data.reasoning_gym import draw_problems
from gppo_megatron.data.split import Problems, check_room
from gppo_megatron.errors import ConfigError
from gppo_megatron.evaluate.held_out import Evaluate, Evaluation
from gppo_megatron.lasting import Lasting
from gppo_megatron.objective.advantages import ADVANTAGES
from gppo_megatron.objective.policy_gradient import MaximumLikelihood
from gppo_megatron.objective.presets import Aggregation
from gppo_megatron.objective.sampler_gap import GapMeasured
from gppo_megatron.observe.console import Console
from gppo_megatron.observe.jsonl import JsonLines
from gppo_megatron.observe.record import Record
from gppo_megatron.observe.report import write_html, write_png
from gppo_megatron.observe.sinks import Sink
from gppo_megatron.observe.stop_request import StopRequest
from gppo_megatron.observe.tensorboard import TensorBoard
from gppo_megatron.observe.watchdog import Deadlines, Watchdog
from gppo_megatron.policy.megatron.arrangement import Arrangement, EndToEnd, Shares, SideBySide
from gppo_megatron.policy.megatron.checkpoint import Checkpoints
from gppo_megatron.policy.megatron.divergence import head_divergence
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import HAVE_TRANSFORMER_ENGINE, build_model, transformer_config
from gppo_megatron.policy.megatron.peak import peak_tflops
from gppo_megatron.policy.megatron.platform import device_of
from gppo_megatron.policy.megatron.precision import DTYPES, check_device
from gppo_megatron.policy.megatron.preflight import preflight
from gppo_megatron.policy.megatron.save import SaveHf
from gppo_megatron.policy.megatron.scoring import measured_of_anchor
from gppo_megatron.policy.megatron.topology import MegatronTopology, topology
from gppo_megatron.policy.megatron.update import MegatronModel, MegatronPolicy, ReferenceScorer, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.rollout.collect import Collector
from gppo_megatron.rollout.engine import Engine, Sampling
from gppo_megatron.rollout.probe import PolicyGap
from gppo_megatron.rollout.source import GivenAnswers
from gppo_megatron.run_folder import (
    CHECKPOINTS,
    METRICS,
    TRAINED,
    new_run_folder,
    reopened_run_folder,
)
from gppo_megatron.train import Every, InTurn, RolloutSource, Run, train
from gppo_megatron.train_state import seed_generators
from gppo_megatron.types import TrainBatch
from gppo_megatron.weight_sync.in_process import Withheld

ARRANGEMENTS: dict[str, Callable[[Shares], Arrangement]] = {"packed": EndToEnd, "padded": SideBySide}
COLLECTIVE_MARGIN_SECONDS = 60
"""A collective gives up after the watchdog, which can say more."""
CURVES, REPORT = "curves.png", "report.html"
ALIVE = "alive"


def run_training(config: RunConfig, resume: bool) -> None:
    """Collective: the whole run, as one of its processes. `config` has passed its checks.

    resume: go on from the newest checkpoint of the run folder, where that is there already; else it is new.
    """
    device = device_of(config.device)
    check_device(config.precision, device, HAVE_TRANSFORMER_ENGINE)
    torch.set_num_threads(config.threads)
    seed_generators(config.seed)
    folder, rank = Path(config.run), int(os.environ.get("RANK", "0"))
    timeout = config.watchdog.phase + COLLECTIVE_MARGIN_SECONDS
    with ExitStack() as resources:
        standing = None
        if rank == 0 and resume and folder.exists():
            standing = resources.enter_context(reopened_run_folder(config, folder))
            shutil.rmtree(folder / ALIVE, ignore_errors=True)
        elif rank == 0:
            resources.enter_context(new_run_folder(config, folder))
        # Joining the other processes waits for rank 0, so everyone finds the folder complete.
        teams = resources.enter_context(topology(config.parallel, device, config.seed, timeout))
        standing = teams.world.gather(standing)[0]
        report = preflight(device, teams.world)
        judge = resources.enter_context(closing(open_judge(config)))
        model_folder = open_folder(model_path(config))
        teams.world.gather(None)  # all have read the folder before a process may fail and remove it
        stop = StopRequest()
        deadlines = Deadlines(config.watchdog.silence, config.watchdog.phase, config.save.grace)
        watchdog = Watchdog(folder / ALIVE, teams.world.rank, teams.world.size, deadlines, stop)
        resources.enter_context(watchdog)
        if rank == 0:
            print(report if standing is None else f"{report}\nresuming   {standing}", flush=True)
        problems = find_problems(config, model_folder, speaks=rank == 0)
        sinks = open_sinks(config, folder) if rank == 0 else []
        checkpoints = Checkpoints(folder / CHECKPOINTS, teams.world, config.save, dump(config), model_folder.path)
        kept = next((sink.bytes_kept for sink in sinks if isinstance(sink, JsonLines)), int)  # rank 0 alone writes it
        lasting = Lasting(config, checkpoints, teams.world, standing, stop, watchdog, kept)
        rollouts = resources.enter_context(
            open_rollouts(config, model_folder, DTYPES[config.precision.dtype], device, teams.world)
        )
        builder = Builder(config, device, teams, model_folder, judge, problems, sinks, rollouts, lasting)
        with stop:
            policy, evaluate = builder.run_stages()
        watchdog.enter("writing the trained model")
        builder.saver(policy).write(folder / TRAINED)
    for sink in sinks:
        sink.close()
    if rank == 0:
        write_reports(config, folder, evaluate)


def find_problems(config: RunConfig, model_folder: ModelFolder, speaks: bool) -> Problems:
    """What the run trains and is evaluated on. speaks: whether to print what was found out about it."""
    match config.data:
        case ReasoningGymData() as data:
            problems = draw_problems(data, model_folder.tokenizer)
        case FileData() as data:
            problems = load_problems(data, model_folder.tokenizer, say=print if speaks else lambda line: None)
    rooms = {
        "the model's positions": model_folder.architecture.max_positions,
        config.rollout.room.key: config.rollout.room.tokens,
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
    print(f"wrote {folder / REPORT}, {folder / CURVES} and the trained model {folder / TRAINED}", flush=True)


@dataclass(frozen=True)
class Builder:
    """What the stages of a run share."""

    config: RunConfig
    device: torch.device
    teams: MegatronTopology
    model_folder: ModelFolder
    judge: Judge
    problems: Problems
    sinks: Sequence[Sink]
    rollouts: Rollouts
    lasting: Lasting

    def run_stages(self) -> tuple[MegatronPolicy, Evaluate]:
        """Collective: train every stage in turn; each one's optimizer is built when its stage begins."""
        model = self.load_model(self.model_folder.path)
        evaluate = self.evaluation(self.rollouts.engine)
        version = 0
        for warmup in self.warmups():
            policy = MegatronPolicy(model, warmup.optimizer, warmup.steps)
            train(self.lasting.stage("warmup", self.supervised(policy, warmup), policy))
            version = policy.version
        steps = self.config.steps * self.config.batch.updates
        cell = resolve_objective(self.config).cell
        exact = head_divergence(replace(cell, estimator="exact")) if self.config.diagnostics.exact_sample else None
        trained = model.replaying() if self.replays else model
        policy = MegatronPolicy(trained, self.config.optimizer, steps, version, head_divergence(cell), exact)
        with self.source() as source:
            train(self.lasting.stage("train", self.reinforcement(policy, source, evaluate), policy))
        return policy, evaluate

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.precision.dtype]

    @property
    def peak_flops(self) -> float | None:
        """Operations a second of this process's device."""
        given = self.config.diagnostics.peak_tflops
        peak = given if given is not None else peak_tflops(self.device, self.dtype)
        return None if peak is None else peak * 1e12

    @property
    def replays(self) -> bool:
        return self.config.objective.routing == "replayed"

    def warmups(self) -> Iterator[Warmup]:
        """None where it is already over."""
        if self.config.warmup is not None and not self.lasting.warmup_is_over():
            yield self.config.warmup

    def load_model(self, folder: Path, frozen: bool = False) -> MegatronModel:
        """Collective: this process's part of the model, filled from a folder of the model's architecture."""
        architecture, parallel = self.model_folder.architecture, self.config.parallel
        memory = self.config.memory
        megatron = transformer_config(
            architecture,
            parallel,
            self.device,
            self.dtype,
            self.config.megatron,
            memory,
            replay=self.replays and not frozen,
            fp8=self.config.precision.fp8,
        )
        chunks = build_model(megatron, architecture, self.device, parallel, memory, frozen)
        load(chunks, architecture, HfReader(folder))
        arrange = ARRANGEMENTS[self.config.batch.arrangement]
        return loaded_model(chunks, architecture, self.config.rollout.temperature, self.device, arrange)

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
            packer=self.packer(1, "token_mean", None),
            scorers=(),
            sync=Withheld(),
            at_start=(),
            after_step=(Record(self.teams.world, "warmup", self.sinks, self.peak_flops),),
        )

    def source(self) -> AbstractContextManager[RolloutSource]:
        """The groups that training samples."""
        config, top_tokens = self.config, resolve_objective(self.config).sampled_top_tokens
        collector = self.collector(self.rollouts.engine, config.batch.group, config.seed, top_tokens, self.replays)
        stream = PromptStream(self.problems.train, config.seed)
        return open_source(config, stream, collector, self.rollouts, self.teams)

    def reinforcement(self, policy: MegatronPolicy, source: RolloutSource, evaluate: Evaluate) -> Run:
        """GPPO on sampled, judged answers."""
        config, resolved = self.config, resolve_objective(self.config)
        record = Record(self.teams.world, "train", self.sinks, self.peak_flops)
        save_every = config.save.every or config.steps + 1
        return Run(
            steps=config.steps,
            policy=policy,
            objective=GapMeasured(diagnosed(objective_of(resolved), resolved, config.diagnostics)),
            rollouts=source,
            advantage=ADVANTAGES[resolved.advantage],
            packer=self.packer(config.batch.updates, resolved.aggregation, resolved.length),
            scorers=self.scorers(policy, resolved),
            sync=self.rollouts.checked(
                PolicyGap(self.packer(1, "token_mean", None), policy.annotate, self.problems.train[0])
            ),
            at_start=(evaluate, record),
            after_step=(
                *self.rollouts.reports,
                Every(config.evaluation.every, config.steps, evaluate),
                Every(save_every, save_every, self.saver(policy)),
                InTurn((record, gap_alarm(config, self.teams.world))),
            ),
        )

    def packer(self, updates: int, aggregation: Aggregation, constant_length: int | None) -> Packer:
        batch, parallel = self.config.batch, self.config.parallel
        unit = alignment(parallel, self.config.precision.fp8)
        rooms: dict[str, Room] = {
            "packed": PackedRoom(slices(parallel), unit),
            "padded": PaddedRoom(unit),
        }
        return Packer(
            updates=updates,
            micro_batch_tokens=batch.micro_batch_tokens,
            aggregation=aggregation,
            constant_length=constant_length,
            data_team=self.teams.data,
            multiple=micro_batch_multiple(parallel),
            room=rooms[batch.arrangement],
            work=Work(linear_work(self.model_folder.architecture)),
        )

    def scorers(
        self, policy: MegatronPolicy, resolved: ResolvedObjective
    ) -> tuple[Callable[[TrainBatch], TrainBatch], ...]:
        """Collective: what annotates a batch before its updates."""
        sample = self.config.diagnostics.exact_sample
        measurements = measured_of_anchor(resolved.anchor, resolved.cell.estimator, resolved.topk, sample)
        anchor = (partial(policy.score, measurements),) if measurements else ()
        penalised = any(isinstance(term, schema.ReferenceKl) for term in resolved.auxiliary)
        return (*anchor, ReferenceScorer(self.load_model(self.reference(policy), frozen=True))) if penalised else anchor

    def reference(self, policy: MegatronPolicy) -> Path:
        """Collective."""
        return reference_folder(self.config, self.model_folder.path, self.teams.world, self.saver(policy).write)

    def collector(
        self, engine: Engine, group_size: int, seed: int, top_tokens: int = 0, experts: bool = False
    ) -> Collector:
        rollout, tokenizer = self.config.rollout, self.model_folder.tokenizer
        stop_ids = tokenizer.end_ids | self.problems.stop_ids
        sampling = Sampling(rollout.temperature, rollout.max_new_tokens, stop_ids, top_tokens, experts)
        return Collector(engine, self.judge, sampling, tokenizer.decode, group_size, seed)

    def evaluation(self, engine: Engine) -> Evaluate:
        config = self.config.evaluation
        collector = self.collector(engine, config.samples, self.config.seed)
        prompts = self.problems.heldout[: config.prompts]
        return Evaluate(Evaluation(collector, prompts, self.model_folder.tokenizer.decode, self.teams.world))

    def saver(self, policy: MegatronPolicy) -> SaveHf:
        return SaveHf(policy, Path(self.config.run), self.model_folder.path, self.teams.world)
