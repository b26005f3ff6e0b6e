"""Run under several processes: optimizer steps on the same global batches in one layout after another.

usage: layouts.py CASES OUTPUT; CASES: a pickled list of `Case`, all of as many processes as were started; rank 0 saves
the fields of an `Outcome` each to OUTPUT.
"""

import dataclasses
import pickle
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from gppo_verifiers.types import Status, Task, Verdict
from megatron.core.distributed import DistributedDataParallelConfig

from gppo_megatron.config.architecture import Architecture, read_architecture
from gppo_megatron.config.schema import Memory, Optimizer, Parallel
from gppo_megatron.data.packing import Packer
from gppo_megatron.objective.policy_gradient import PolicyGradient, TokenLoss, TokenStreams
from gppo_megatron.objective.presets import PRESETS, Aggregation
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron import model as building
from gppo_megatron.policy.megatron.arrangement import EndToEnd, SideBySide
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.topology import layout, world
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.types import Group, Prompt, Trajectory

SEQUENCES, GROUP = 16, 4
TEMPERATURE = 0.8
STEPS, LENGTH = 3, 8
BUCKET = 1024
"""Parameters of one exchange where they overlap with computing: so few that the head has one of its own."""
# An epsilon far above the rounding of a gradient near 0, which AdamW would otherwise blow up to a whole step.
OPTIMIZER = Optimizer(lr=1e-3, weight_decay=0.1, clip_grad=0.5, eps=1e-4)


def groups_of(vocab: int, step: int = 0) -> list[Group]:
    """The same 16 ragged sequences on every process, with sampler log-probs some way off the policy's."""
    random = np.random.Generator(np.random.Philox(key=5 + step))
    groups = []
    for index in range(SEQUENCES // GROUP):
        prompt = tuple(int(token) for token in random.integers(2, vocab, size=3 + index))
        trajectories = []
        for _ in range(GROUP):
            response = random.integers(2, vocab, size=int(random.integers(1, 9)))
            trainable = np.arange(len(prompt) + len(response)) >= len(prompt)
            logprobs = np.where(trainable, -np.log(vocab) + random.normal(0, 0.6, len(trainable)), 0)
            trajectories.append(
                Trajectory(
                    token_ids=np.concatenate([np.array(prompt), response]),
                    sampler_logprobs=logprobs.astype(np.float32),
                    trainable=trainable,
                    policy_versions=np.where(trainable, 0, -1),
                    finish="stop",
                    verdict=Verdict(float(random.random() > 0.5), Status.GRADED),
                )
            )
        groups.append(Group(Prompt(str(index), prompt, Task("none")), tuple(trajectories)))
    return groups


def sent(trajectory: Trajectory, architecture: Architecture) -> Trajectory:
    """The same as if its tokens had been sent to experts at random, the last one to none."""
    experts = architecture.experts
    assert experts is not None
    random = np.random.Generator(np.random.Philox(key=int(trajectory.token_ids.sum())))
    order = random.random((len(trajectory.token_ids), architecture.layers, experts.count)).argsort(axis=2)
    chosen = order[:, :, : experts.per_token].astype(np.int16)
    chosen[:, list(experts.dense)] = chosen[-1] = -1
    return dataclasses.replace(trajectory, experts=chosen)


def advantage_of(trajectory: Trajectory) -> float:
    """0.9 or -1.1: both signs, and no symmetry that could hide an error."""
    return float(trajectory.verdict.score or 0.0) * 2 - 1.1


@dataclasses.dataclass(frozen=True)
class Recording:
    """Passes an objective through, keeping how close any token came to its threshold and the log-probs it saw."""

    objective: PolicyGradient
    distances: list[float]
    logprobs: list[torch.Tensor]

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        region = self.objective.region
        decision = region.decide(streams.logprobs_T, streams.anchor_logprobs_T, streams.advantages_T)
        off_T = decision.divergence_T[streams.mask_T]
        nearest = [
            (off_T - delta).abs().min() for delta in (region.cell.delta_low, region.cell.delta_high) if len(off_T)
        ]
        self.distances.extend(float(value) for value in nearest)
        self.logprobs.append(streams.logprobs_T.detach()[streams.mask_T])
        return self.objective(streams)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout of the processes and a way to cut the batch; `arrange` is a name of ARRANGEMENTS. replay: of `sent`."""

    folder: str
    parallel: Parallel
    memory: Memory = Memory()  # noqa: RUF009 - frozen
    micro_batch_tokens: int = 4096
    aggregation: Aggregation = "token_mean"
    arrange: str = "packed"
    replay: bool = False

    def __str__(self) -> str:
        default = Case(self.folder, Parallel())
        names = [Path(self.folder).name]
        for mine, plain in ((self, default), (self.parallel, default.parallel), (self.memory, default.memory)):
            for field in dataclasses.fields(mine):
                value = getattr(mine, field.name)
                if value != getattr(plain, field.name) and field.name not in {"parallel", "memory"}:
                    names.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(names)


ARRANGEMENTS = {"packed": EndToEnd, "padded": SideBySide}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What rank 0 knows of a case: a norm and a loss a step; by Hugging Face name the clipped gradients of the first
    step (none where the replicas share them) and the weights after the last. nearest: the least distance of a token to
    its threshold. micro_batches: of this rank and the last step. reports: processes that reported metrics."""

    norms: list[float]
    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    nearest: float
    micro_batches: int
    reports: int


def run_case(case: Case) -> Outcome:
    """Collective over a world of the case's size: STEPS optimizer steps."""
    architecture = read_architecture(Path(case.folder))
    with layout(case.parallel, seed=1, timeout_seconds=60) as teams:
        config = transformer_config(architecture, case.parallel, CPU, torch.float32, {}, case.memory, case.replay)
        chunks = build_model(config, architecture, CPU, case.parallel, case.memory)
        load(chunks, architecture, HfReader(Path(case.folder)))
        model = loaded_model(chunks, architecture, TEMPERATURE, CPU, ARRANGEMENTS[case.arrange])
        policy = MegatronPolicy(model.replaying() if case.replay else model, OPTIMIZER, optimizer_steps=10)
        objective = Recording(PolicyGradient(TrustRegion(PRESETS["gppo"].cell)), [], [])
        reports, gradients = [], {}
        multiple = case.parallel.pipeline if case.parallel.virtual_stages > 1 else 1
        packer = Packer(1, case.micro_batch_tokens, case.aggregation, LENGTH, teams.data, multiple)
        for step in range(STEPS):
            groups = groups_of(architecture.vocab, step)[teams.data.rank :: teams.data.size]
            if case.replay:
                groups = [
                    Group(group.prompt, tuple(sent(trajectory, architecture) for trajectory in group.trajectories))
                    for group in groups
                ]
            advantages = [[advantage_of(trajectory) for trajectory in group.trajectories] for group in groups]
            (batch,) = packer.pack(groups, advantages)
            reports.append([report for report in teams.world.gather(policy.update(batch, objective).flat()) if report])
            if step == 0 and not case.memory.distributed_optimizer:
                exported = model.export(lambda weight: weight.main_grad, torch.float32)
                gradients = {name: tensor.clone() for name, tensor in exported}
        return Outcome(
            norms=[report[0]["optimizer/grad_norm"] for report in reports],
            losses=[sum(values["loss/total"] for values in report) for report in reports],
            gradients=gradients,
            weights={name: tensor.clone() for name, tensor in policy.weights()},
            nearest=min(value for part in teams.world.gather(objective.distances) for value in part),
            micro_batches=len(batch.micro_batches),
            reports=len(reports[0]),
        )


def main(cases: list[Case], output: Path) -> None:
    torch.set_num_threads(1)
    small = partial(DistributedDataParallelConfig, bucket_size=BUCKET)
    with (
        mock.patch.object(building, "DistributedDataParallelConfig", small),
        world(cases[0].parallel.processes, CPU, timeout_seconds=300),
    ):
        outcomes = {}
        for case in cases:
            start = time.monotonic()
            outcomes[str(case)] = vars(run_case(case))
            print(f"{time.monotonic() - start:.1f} s {case}", flush=True)
        if dist.get_rank() == 0:
            torch.save(outcomes, output)


if __name__ == "__main__":
    plan, output = sys.argv[1:]
    main(pickle.loads(Path(plan).read_bytes()), Path(output))
