"""Run under several processes: two optimizer steps, or what another layout wrote after them, and then two more.

usage: reshard.py JOBS; a pickled list of `Job`, all of as many processes as were started
"""

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.layout import micro_batch_multiple
from gppo_megatron.config.schema import Memory, Optimizer, Parallel
from gppo_megatron.data.packing import Packer
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.shards import read_shards, write_shards
from gppo_megatron.policy.megatron.topology import layout, world
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from tests.distributed.layouts import TEMPERATURE, advantage_of, groups_of

# An epsilon far above the rounding of a gradient near 0, which AdamW would otherwise blow up to a whole step.
OPTIMIZER = Optimizer(lr=1e-3, weight_decay=0.1, schedule="linear", clip_grad=1e9, eps=1e-4)


@dataclass(frozen=True)
class Job:
    """read: the shards to go on from; None: two steps from the weights of `model`. write: where to put the state."""

    model: Path
    parallel: Parallel
    memory: Memory
    read: Path | None
    write: Path | None
    output: Path


def run_job(job: Job) -> None:
    """Collective over a world of the job's size."""
    architecture = read_architecture(job.model)
    with layout(job.parallel, seed=1, timeout_seconds=60) as teams:
        config = transformer_config(architecture, job.parallel, CPU, torch.float32, {}, job.memory)
        chunks = build_model(config, architecture, CPU, job.parallel, job.memory)
        load(chunks, architecture, HfReader(job.model))
        policy = MegatronPolicy(loaded_model(chunks, architecture, TEMPERATURE, CPU), OPTIMIZER, optimizer_steps=10)
        groups = groups_of(architecture.vocab)[teams.data.rank :: teams.data.size]
        advantages = [[advantage_of(trajectory) for trajectory in group.trajectories] for group in groups]
        packer = Packer(1, 64, "token_mean", None, teams.data, micro_batch_multiple(job.parallel))
        (batch,) = packer.pack(groups, advantages)
        objective = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
        if job.read is None:
            for _ in range(2):
                policy.update(batch, objective)
        else:
            policy.restore(read_shards(job.read, policy.state(loading=True), every=True))
        if job.write is not None:
            write_shards(job.write, policy.state(), asynchronous=False)
        steps = [teams.world.gather(policy.update(batch, objective).flat()) for _ in range(2)]
        weights = {name: tensor.clone() for name, tensor in policy.weights()}
        if teams.world.rank == 0:
            metrics = [next(values for values in step if values) for step in steps]
            torch.save({"weights": weights, "metrics": metrics, "version": policy.version}, job.output)


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs: list[Job] = pickle.loads(Path(sys.argv[1]).read_bytes())
    with world(jobs[0].parallel.processes, CPU, timeout_seconds=300):
        for job in jobs:
            print(job, flush=True)
            run_job(job)
