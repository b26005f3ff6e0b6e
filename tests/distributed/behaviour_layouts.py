"""Run under several processes: two updates of a rollout in given layouts, with divergences from the head.

usage: behaviour_layouts.py MODEL_FOLDER PICKLED_LAYOUTS OUTPUT; the layouts have one number of processes
"""

import pickle
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.schema import Memory, Optimizer, Parallel
from gppo_megatron.data.packing import Packer
from gppo_megatron.objective.divergences import generator_of
from gppo_megatron.objective.policy_gradient import PolicyGradient, TokenLoss, TokenStreams
from gppo_megatron.objective.presets import Cell
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.divergence import ExactDivergence, TopKDivergence
from gppo_megatron.policy.megatron.forward import HeadEstimates
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.scoring import AnchorLogprobs, OwnRows, OwnTopTokens
from gppo_megatron.policy.megatron.topology import layout, world
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from tests.distributed.layouts import TEMPERATURE, advantage_of, groups_of

DIVERGENCE, COUNT = "js", 4
CPU = torch.device("cpu")
SAMPLE = 2
EXACT, TOP_K = ExactDivergence(generator_of(DIVERGENCE)), TopKDivergence(generator_of(DIVERGENCE))
ESTIMATES = {
    "exact": HeadEstimates(divergence=EXACT),
    "topk": HeadEstimates(divergence=TOP_K),
    "atomic": HeadEstimates(exact=EXACT),
}
"""By the estimator of the trust region; with the last, the exact divergence of a sample beside it."""


class Update(NamedTuple):
    """weights: those before it. seen: [3, N], of all N predictions the log-prob under the anchor, the log-prob and the
    head's divergence. kept: a replica's share of positive tokens kept."""

    weights: dict[str, torch.Tensor]
    seen: torch.Tensor
    kept: list[float]


@dataclass
class Watching:
    """Passes an objective through, keeping what `Update.seen` holds."""

    objective: PolicyGradient
    seen: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        (divergence_T,) = (each for each in (streams.divergence_T, streams.exact_T) if each is not None)
        kept = torch.stack([streams.anchor_logprobs_T, streams.logprobs_T.detach(), divergence_T])
        self.seen.append(kept[:, streams.mask_T])
        return self.objective(streams)


def updates_of(folder: Path, parallel: Parallel, estimator: str) -> list[Update]:
    """Collective over a world of the layout's size: two updates of one rollout, scored before the first."""
    architecture = read_architecture(folder)
    with layout(parallel, seed=1, timeout_seconds=60) as teams:
        config = transformer_config(architecture, parallel, CPU, torch.float32, {}, Memory())
        chunks = build_model(config, architecture, CPU, parallel)
        load(chunks, architecture, HfReader(folder))
        model = loaded_model(chunks, architecture, TEMPERATURE, CPU)
        policy = MegatronPolicy(model, Optimizer(lr=1e-2), 10, **ESTIMATES[estimator]._asdict())
        groups = groups_of(architecture.vocab)[teams.data.rank :: teams.data.size]
        advantages = [[advantage_of(trajectory) for trajectory in group.trajectories] for group in groups]
        multiple = parallel.pipeline if parallel.virtual_stages > 1 else 1
        (batch,) = Packer(1, 40, "token_mean", None, teams.data, multiple).pack(groups, advantages)
        rows = OwnRows(sampled_here=True, count=SAMPLE if estimator == "atomic" else None)
        batch = policy.score([AnchorLogprobs(), rows, OwnTopTokens(COUNT)], batch)
        objective = PolicyGradient(TrustRegion(Cell(DIVERGENCE, estimator, 0.02, 0.02)))
        updates = []
        for _ in range(2):
            weights = {name: tensor.clone() for name, tensor in policy.weights()}
            watch = Watching(objective)
            reports = [report for report in teams.world.gather(policy.update(batch, watch).flat()) if report]
            # All processes of a replica's last stage see the same; one speaks for it.
            spoken = torch.cat(watch.seen, 1) if watch.seen and teams.replica.rank == teams.replica.size - 1 else None
            seen = [part for part in teams.world.gather(spoken) if part is not None]
            updates.append(Update(weights, torch.cat(seen, 1), [report["kept/positive"] for report in reports]))
        return updates


def main(folder: Path, layouts: list[Parallel], output: Path) -> None:
    torch.set_num_threads(1)
    with world(layouts[0].processes, CPU, timeout_seconds=300):
        results = {
            (str(parallel), name): [update._asdict() for update in updates_of(folder, parallel, name)]
            for parallel in layouts
            for name in ESTIMATES
        }
        if dist.get_rank() == 0:
            torch.save(results, output)


if __name__ == "__main__":
    folder, plan, output = map(Path, sys.argv[1:])
    main(folder, pickle.loads(plan.read_bytes()), output)
