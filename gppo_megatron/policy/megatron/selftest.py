"""One batch through every layout that fits the processes at hand, each compared with one process alone.

For a user's own cluster: wrong networks, drivers and libraries show here as numbers before they cost a run.
"""

import hashlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from gppo_verifiers.types import Status, Task, Verdict

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.layout import micro_batch_multiple
from gppo_megatron.config.schema import Memory, Optimizer, Parallel, TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.data.packing import Packer
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.topology import MegatronTopology, layout, world
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.types import Group, Prompt, Trajectory

SEED = 1
MODEL = TinyModel(layers=8, heads=8, kv_heads=8, head_dim=8)
MICRO_BATCH_TOKENS = 96
SEQUENCES_OF_A_PROCESS = 6
# An epsilon far above the rounding of a gradient near 0, which AdamW would otherwise blow up to a whole step.
OPTIMIZER = Optimizer(lr=1e-3, weight_decay=0.1, eps=1e-4)
SHARED = Memory(distributed_optimizer=True)


@dataclass(frozen=True)
class Layout:
    """A way to share the work of one optimizer step."""

    parallel: Parallel
    memory: Memory

    def __str__(self) -> str:
        """What differs from one process: `tensor 2, sequence`."""
        parts = []
        for section, plain in ((self.parallel, Parallel()), (self.memory, Memory())):
            for item in fields(section):
                value = getattr(section, item.name)
                if value != getattr(plain, item.name):
                    parts.append(item.name if value is True else f"{item.name} {value}")
        return ", ".join(parts) or "one process"


@dataclass(frozen=True)
class Outcome:
    """Of one step: the loss, the gradient's norm, the weights afterwards, and the digests of the weights that every
    process would have sent to its sampler before the step."""

    loss: float
    norm: float
    weights: dict[str, torch.Tensor]
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """Relative differences from the reference; weights: the largest of any tensor, over its largest entry.

    synced: whether every process sends the weights of the model folder, bit by bit.
    """

    layout: Layout
    loss: float
    norm: float
    weights: float
    synced: bool

    def passes(self, tolerance: float) -> bool:
        return self.synced and all(value <= tolerance for value in (self.loss, self.norm, self.weights))


def layouts_for(processes: int) -> Iterator[Layout]:
    """All that fit `processes` and the test's model; what is left over is data parallel."""
    sizes = [size for size in range(1, processes + 1) if processes % size == 0]
    for tensor, pipeline, context in itertools.product(sizes, repeat=3):
        fits = MODEL.heads % tensor == 0 and MODEL.layers % pipeline == 0
        if not fits or processes % (tensor * pipeline * context):
            continue
        parallel = Parallel(tensor, pipeline, processes // (tensor * pipeline * context), context)
        yield Layout(parallel, Memory())
        if tensor > 1:
            yield Layout(replace(parallel, sequence=True), Memory())
        if pipeline > 1 and MODEL.layers % (2 * pipeline) == 0:
            yield Layout(replace(parallel, virtual_stages=2), Memory())
        if parallel.data * context > 1:
            yield Layout(parallel, SHARED)
            yield Layout(replace(parallel, overlap_gradients=True, overlap_parameters=True), SHARED)
    yield Layout(Parallel(data=processes), Memory(recompute="full"))


def run(processes: int, device: torch.device) -> Iterator[Difference]:
    """Collective over `processes`: one difference a layout, the same on all processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        create_tiny(MODEL, folder, SEED)
        groups = _groups(processes)
        alone = Layout(Parallel(), Memory())
        with world(1, device, timeout_seconds=300), layout(alone.parallel, SEED, 300) as teams:
            reference = _step(folder, groups, alone, device, teams)
        with world(processes, device, timeout_seconds=300):
            for candidate in layouts_for(processes):
                with layout(candidate.parallel, SEED, 300) as teams:
                    ours = _step(folder, groups, candidate, device, teams)
                    yield _difference(candidate, ours, reference)


def _step(
    folder: Path, groups: list[Group], candidate: Layout, device: torch.device, teams: MegatronTopology
) -> Outcome:
    architecture, parallel, memory = read_architecture(folder), candidate.parallel, candidate.memory
    config = transformer_config(architecture, parallel, device, torch.float32, {}, memory)
    chunks = build_model(config, architecture, device, parallel, memory)
    load(chunks, architecture, HfReader(folder))
    policy = MegatronPolicy(loaded_model(chunks, architecture, 1.0, device), OPTIMIZER, optimizer_steps=10)
    digest = _digest(dict(policy.weights()))
    multiple = micro_batch_multiple(parallel)
    packer = Packer(1, MICRO_BATCH_TOKENS, "sequence_mean", None, teams.data, multiple)
    mine = groups[teams.data.rank :: teams.data.size]
    (batch,) = packer.pack(mine, [[1.0, -0.7] for _ in mine])
    metrics = policy.update(batch, PolicyGradient(TrustRegion(PRESETS["gppo"].cell))).flat()
    reports = [report for report in teams.world.gather(metrics) if report]
    return Outcome(
        loss=sum(report["loss/total"] for report in reports),
        norm=reports[0]["optimizer/grad_norm"],
        weights={name: tensor.clone() for name, tensor in policy.weights()},
        digests=tuple(teams.world.gather(digest)),
    )


def _difference(candidate: Layout, ours: Outcome, reference: Outcome) -> Difference:
    return Difference(
        candidate,
        loss=abs(ours.loss / reference.loss - 1),
        norm=abs(ours.norm / reference.norm - 1),
        weights=max(
            float((ours.weights[name] - tensor).abs().max() / tensor.abs().max())
            for name, tensor in reference.weights.items()
        ),
        synced=set(ours.digests) == set(reference.digests),
    )


def _digest(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].cpu().numpy().tobytes())
    return digest.hexdigest()


def _groups(processes: int) -> list[Group]:
    """Pairs of ragged random answers, with sampler log-probs on either side of the policy's."""
    random = np.random.Generator(np.random.Philox(key=SEED))
    vocab = 2 + len(MODEL.alphabet)
    groups = []
    for index in range(processes * SEQUENCES_OF_A_PROCESS // 2):
        prompt = tuple(int(token) for token in random.integers(2, vocab, 3))
        trajectories = []
        for length in random.integers(2, 40, 2):
            trainable = np.arange(3 + length) >= 3
            logprobs = np.where(trainable, -np.log(vocab) + random.normal(0, 0.3, 3 + length), 0)
            trajectories.append(
                Trajectory(
                    token_ids=np.concatenate([np.array(prompt), random.integers(2, vocab, length)]),
                    sampler_logprobs=logprobs.astype(np.float32),
                    trainable=trainable,
                    policy_versions=np.where(trainable, 0, -1),
                    finish="stop",
                    verdict=Verdict(1.0, Status.GRADED),
                )
            )
        groups.append(Group(Prompt(str(index), prompt, Task("none")), tuple(trajectories)))
    return groups


def report(processes: int, device: torch.device, tolerance: float, speaks: bool) -> bool:
    """Collective: prints a line a layout where `speaks`; whether all pass."""
    if speaks:
        print(f"{'layout':64} {'loss':>8} {'norm':>8} {'weights':>8}  sync", flush=True)
    passed = []
    for difference in run(processes, device):
        passed.append(difference.passes(tolerance))
        if speaks:
            numbers = f"{difference.loss:8.1e} {difference.norm:8.1e} {difference.weights:8.1e}"
            sync, verdict = "same" if difference.synced else "DIFFERS", "" if passed[-1] else "  FAILED"
            print(f"{difference.layout!s:64} {numbers}  {sync}{verdict}", flush=True)
    if speaks:
        good = "all equal" if all(passed) else f"{passed.count(False)} of {len(passed)} layouts FAILED"
        print(f"{good} to one process within {tolerance:g}, {processes} process{'es' * (processes > 1)}", flush=True)
    return all(passed)
