"""Run under several processes: two optimizer steps, or what another layout wrote after them, and then two more.

usage: reshard.py MODEL_FOLDER TENSOR PIPELINE DATA DISTRIBUTED_OPTIMIZER READ_FROM|- WRITE_TO|- OUTPUT
"""

import sys
from pathlib import Path

import torch

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.schema import Memory, Optimizer, Parallel
from gppo_megatron.data.packing import Packer
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.shards import read_shards, write_shards
from gppo_megatron.policy.megatron.topology import topology
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from tests.distributed.layouts import TEMPERATURE, advantage_of, groups_of

OPTIMIZER = Optimizer(lr=1e-3, weight_decay=0.1, schedule="linear", clip_grad=1e9)


def main(folder: Path, parallel: Parallel, memory: Memory, read_from: str, write_to: str, output: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    architecture = read_architecture(folder)
    with topology(parallel, device, seed=1, timeout_seconds=60) as teams:
        chunks = build_model(
            transformer_config(architecture, parallel, device, torch.float32, {}), architecture, device
        )
        load(chunks, architecture, HfReader(folder))
        model = loaded_model(chunks, architecture, TEMPERATURE, device)
        policy = MegatronPolicy(model, OPTIMIZER, optimizer_steps=10)
        groups = groups_of(architecture.vocab)[teams.data.rank :: teams.data.size]
        advantages = [[advantage_of(trajectory) for trajectory in group.trajectories] for group in groups]
        (batch,) = Packer(1, 64, "token_mean", None, teams.data).pack(groups, advantages)
        objective = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
        if read_from == "-":
            for _ in range(2):
                policy.update(batch, objective)
        else:
            policy.restore(read_shards(Path(read_from), policy.state(loading=True), every=True))
        if write_to != "-":
            write_shards(Path(write_to), policy.state(), asynchronous=False)
        steps = [teams.world.gather(policy.update(batch, objective).flat()) for _ in range(2)]
        weights = {name: tensor.clone() for name, tensor in policy.weights()}
        if teams.world.rank == 0:
            metrics = [next(values for values in step if values) for step in steps]
            torch.save({"weights": weights, "metrics": metrics, "version": policy.version}, output)


if __name__ == "__main__":
    folder, tensor, pipeline, data, distributed, read_from, write_to, output = sys.argv[1:]
    parallel = Parallel(int(tensor), int(pipeline), int(data))
    main(Path(folder), parallel, Memory(distributed_optimizer=distributed == "1"), read_from, write_to, Path(output))
