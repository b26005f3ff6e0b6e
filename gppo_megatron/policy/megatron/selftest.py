"""One batch through every layout that fits the processes at hand, each compared with one process alone.

For a user's own cluster: wrong networks, drivers, libraries and disks show here as numbers before they cost a run.
"""

import hashlib
import itertools
import math
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
from gppo_megatron.errors import ConfigError
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.shards import read_shards, write_shards
from gppo_megatron.policy.megatron.topology import MegatronTopology, layout, world
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.types import Group, Prompt, Trajectory

SEED = 1
MODEL = TinyModel(layers=8, heads=8, kv_heads=8, head_dim=8)
SPARSE = TinyModel(layers=2, heads=8, kv_heads=8, head_dim=8, experts=4)
MICRO_BATCH_TOKENS = 96
SEQUENCES_OF_A_PROCESS = 6
# An epsilon far above the rounding of a gradient near 0, which AdamW would otherwise blow up to a whole step.
OPTIMIZER = Optimizer(lr=1e-3, weight_decay=0.1, eps=1e-4)
SHARED = Memory(distributed_optimizer=True)
BITS = {True: "same", False: "DIFFER", None: ""}


@dataclass(frozen=True)
class Layout:
    """A way to share the work of one optimizer step. sparse: of the model with experts."""

    parallel: Parallel
    memory: Memory
    sparse: bool = False

    def __str__(self) -> str:
        """What differs from one process: `tensor 2, sequence`."""
        parts = []
        for section, plain in ((self.parallel, Parallel()), (self.memory, Memory())):
            for item in fields(section):
                value = getattr(section, item.name)
                if value != getattr(plain, item.name):
                    parts.append(item.name if value is True else f"{item.name} {value}")
        name = ", ".join(parts) or "one process"
        return f"experts: {name}" if self.sparse else name


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

    same: whether the bits are that must be: of the weights that every process sends before a first step, or of all that
    a resumed step gives. None: no bits must be.
    """

    name: str
    loss: float
    norm: float
    weights: float
    same: bool | None

    def passes(self, tolerance: float) -> bool:
        return self.same is not False and all(value <= tolerance for value in (self.loss, self.norm, self.weights))


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
    experts = math.gcd(processes, SPARSE.experts)
    if experts > 1:
        yield Layout(Parallel(data=processes, expert=experts), Memory(), sparse=True)
        cut = Parallel(tensor=2, sequence=True, data=processes // 2, expert_tensor=2)
        yield Layout(cut, Memory(), sparse=True)
        yield Layout(Parallel(data=processes, expert=experts), SHARED, sparse=True)


@dataclass(frozen=True)
class Trial:
    """The first and the second step of a layout, and where its state between the two lies."""

    first: Outcome
    second: Outcome
    state: Path


def run(processes: int, device: torch.device, shared: Path | None = None) -> Iterator[Difference]:
    """Collective over `processes`: differences of each layout, the same on all processes.

    shared: a folder that all nodes see; None where this machine is the only one. Raises ConfigError where they do not.
    """
    if shared is not None and not shared.is_dir():
        raise ConfigError(f"--folder: there is no folder {shared}; name one that all nodes share")
    with tempfile.TemporaryDirectory(dir=shared) as name:
        groups = _groups(processes)
        reference = {}
        for sparse, model in ((False, MODEL), (True, SPARSE)):
            create_tiny(model, Path(name) / str(sparse), SEED)
            alone = Layout(Parallel(), Memory(), sparse)
            with world(1, device, timeout_seconds=300), layout(alone.parallel, SEED, 300) as teams:
                reference[sparse] = _try(Setting(Path(name), groups, alone, device, teams), Path(name) / f"of-{sparse}")
        before = {sparse: ("one process", trial.state) for sparse, trial in reference.items()}
        with world(processes, device, timeout_seconds=300):
            for number, candidate in enumerate(layouts_for(processes)):
                with layout(candidate.parallel, SEED, 300) as teams:
                    setting = Setting(Path(name), groups, candidate, device, teams)
                    ours = _try(setting, _common(Path(name), teams) / f"of-{number}")
                    yield _begun(candidate, ours, reference[candidate.sparse])
                    yield _compare("  resumed", _go_on(setting, ours.state), ours.second, exactly=True)
                    where, state = before[candidate.sparse]
                    moved = _go_on(setting, state)
                    yield _compare(f"  resumed from {where}", moved, reference[candidate.sparse].second)
                    before[candidate.sparse] = "the layout before", ours.state


def _common(folder: Path, teams: MegatronTopology) -> Path:
    """Collective: rank 0's folder. Raises ConfigError where another process does not see it."""
    seen: Path = teams.world.gather(folder)[0]
    if not all(teams.world.gather(seen.is_dir())):
        raise ConfigError(f"--folder: not every process sees {seen}; name one on a file system that all nodes share")
    return seen


@dataclass(frozen=True)
class Setting:
    """What a step depends on. models: the folder of the two models."""

    models: Path
    groups: list[Group]
    layout: Layout
    device: torch.device
    teams: MegatronTopology

    def policy(self) -> MegatronPolicy:
        """Collective: with the weights of the model folder, before its first step."""
        folder, parallel, memory = self.models / str(self.layout.sparse), self.layout.parallel, self.layout.memory
        architecture = read_architecture(folder)
        config = transformer_config(architecture, parallel, self.device, torch.float32, {}, memory)
        chunks = build_model(config, architecture, self.device, parallel, memory)
        load(chunks, architecture, HfReader(folder))
        return MegatronPolicy(loaded_model(chunks, architecture, 1.0, self.device), OPTIMIZER, optimizer_steps=10)

    def step(self, policy: MegatronPolicy) -> Outcome:
        """Collective."""
        teams, digest = self.teams, _digest(dict(policy.weights()))
        multiple = micro_batch_multiple(self.layout.parallel)
        packer = Packer(1, MICRO_BATCH_TOKENS, "sequence_mean", None, teams.data, multiple)
        mine = self.groups[teams.data.rank :: teams.data.size]
        (batch,) = packer.pack(mine, [[1.0, -0.7] for _ in mine])
        metrics = policy.update(batch, PolicyGradient(TrustRegion(PRESETS["gppo"].cell))).flat()
        reports = [report for report in teams.world.gather(metrics) if report]
        return Outcome(
            loss=sum(report["loss/total"] for report in reports),
            norm=reports[0]["optimizer/grad_norm"],
            weights={name: tensor.clone() for name, tensor in policy.weights()},
            digests=tuple(teams.world.gather(digest)),
        )


def _try(setting: Setting, state: Path) -> Trial:
    """Collective."""
    policy = setting.policy()
    first = setting.step(policy)
    if setting.teams.world.rank == 0:
        state.mkdir()
    setting.teams.world.gather(None)  # the folder is there
    write_shards(state, policy.state(), asynchronous=False)
    return Trial(first, setting.step(policy), state)


def _go_on(setting: Setting, state: Path) -> Outcome:
    """Collective: the second step, from the state after the first."""
    policy = setting.policy()
    policy.restore(read_shards(state, policy.state(loading=True), every=True))
    return setting.step(policy)


def _begun(candidate: Layout, ours: Trial, reference: Trial) -> Difference:
    same = set(ours.first.digests) == set(reference.first.digests)
    return replace(_compare(str(candidate), ours.first, reference.first), same=same)


def _compare(name: str, ours: Outcome, reference: Outcome, exactly: bool = False) -> Difference:
    """exactly: down to the last bit."""
    worst = {key: float((ours.weights[key] - tensor).abs().max()) for key, tensor in reference.weights.items()}
    same = (ours.loss, ours.norm) == (reference.loss, reference.norm) and not any(worst.values())
    return Difference(
        name,
        loss=abs(ours.loss / reference.loss - 1),
        norm=abs(ours.norm / reference.norm - 1),
        weights=max(worst[key] / float(tensor.abs().max()) for key, tensor in reference.weights.items()),
        same=same if exactly else None,
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


def report(processes: int, device: torch.device, tolerance: float, speaks: bool, shared: Path | None = None) -> bool:
    """Collective: prints lines of each layout where `speaks`; whether all pass. shared: as `run` takes it."""
    if speaks:
        print(f"{'layout':72} {'loss':>8} {'norm':>8} {'weights':>8}  bits", flush=True)
    passed = []
    for difference in run(processes, device, shared):
        passed.append(difference.passes(tolerance))
        if speaks:
            numbers = f"{difference.loss:8.1e} {difference.norm:8.1e} {difference.weights:8.1e}"
            bits, verdict = BITS[difference.same], "" if passed[-1] else "  FAILED"
            print(f"{difference.name:72} {numbers}  {bits}{verdict}".rstrip(), flush=True)
    if speaks:
        good = "all equal" if all(passed) else f"{passed.count(False)} of {len(passed)} comparisons FAILED"
        print(f"{good} to one process within {tolerance:g}, {processes} process{'es' * (processes > 1)}", flush=True)
    return all(passed)
