"""Run under several processes: one optimizer step of the same global batch in a given layout; rank 0 saves what it saw.

usage: layouts.py MODEL_FOLDER TENSOR PIPELINE DATA MICRO_BATCH_TOKENS OUTPUT
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch
from gppo_verifiers.types import Status, Task, Verdict

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.schema import Optimizer, Parallel
from gppo_megatron.data.packing import Packer
from gppo_megatron.objective.policy_gradient import PolicyGradient, TokenLoss, TokenStreams
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.topology import topology
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.types import Group, Prompt, Trajectory

SEQUENCES, GROUP = 16, 4
TEMPERATURE = 0.8


def groups_of(vocab: int) -> list[Group]:
    """The same 16 ragged sequences on every process, with sampler log-probs some way off the policy's."""
    random = np.random.Generator(np.random.Philox(key=5))
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


def main(folder: Path, parallel: Parallel, micro_batch_tokens: int, output: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    architecture = read_architecture(folder)
    with topology(parallel, device, seed=1, timeout_seconds=60) as teams:
        config = transformer_config(architecture, parallel, device, torch.float32, {})
        chunks = build_model(config, architecture, device)
        load(chunks, architecture, HfReader(folder))
        model = loaded_model(chunks, architecture, TEMPERATURE, device)
        policy = MegatronPolicy(model, Optimizer(lr=1e-3, weight_decay=0.1, clip_grad=1e9), optimizer_steps=10)
        groups = groups_of(architecture.vocab)[teams.data.rank :: teams.data.size]
        advantages = [[advantage_of(trajectory) for trajectory in group.trajectories] for group in groups]
        packer = Packer(1, micro_batch_tokens, "token_mean", None, teams.data)
        (batch,) = packer.pack(groups, advantages)
        objective = Recording(PolicyGradient(TrustRegion(PRESETS["gppo"].cell)), [], [])
        metrics = policy.update(batch, objective)
        gradients = {name: tensor.clone() for name, tensor in model.export(lambda parameter: parameter.main_grad)}
        distances = teams.world.gather(objective.distances)
        weights = {name: tensor.clone() for name, tensor in policy.weights()}
        values = teams.world.gather(metrics.flat())
        if teams.world.rank == 0:
            torch.save(
                {
                    "gradients": gradients,
                    "weights": weights,
                    "nearest": min(value for part in distances for value in part),
                    "metrics": [value for value in values if value],
                    "micro_batches": len(batch.micro_batches),
                },
                output,
            )


if __name__ == "__main__":
    folder, tensor, pipeline, data, tokens, output = sys.argv[1:]
    main(Path(folder), Parallel(int(tensor), int(pipeline), int(data)), int(tokens), Path(output))
