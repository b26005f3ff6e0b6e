"""What the diagnostics cost: an optimizer step with and without them, in turn, in one process on the CPU.

    python -m benchmarks.diagnostics [--hidden 256] [--layers 4] [--vocab 8192] [--sequences 32] [--length 128]
        [--exact-sample 32]

Prints the median times of an optimizer step, and the share of it that the diagnostics' own code takes, timed inside the
step; and what the exact divergence of a sample takes beside it. Times are the process's own: what other work takes of a
busy machine does not count.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from gppo_verifiers.types import Status, Task, Verdict

from gppo_megatron.build_objective import diagnosed
from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.derived import ResolvedObjective
from gppo_megatron.config.schema import Diagnostics, Optimizer, Parallel
from gppo_megatron.data.packing import Packer
from gppo_megatron.metrics import Metric
from gppo_megatron.objective.policy_gradient import Objective, PolicyGradient, Seen, TokenLoss, TokenStreams
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.divergence import ExactDivergence, HeadDivergence, HeadRows
from gppo_megatron.policy.megatron.head import TokenStatistics
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.scoring import AnchorLogprobs, OwnRows
from gppo_megatron.policy.megatron.topology import topology
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.types import Alone, Group, MicroBatch, Prompt, TrainBatch, Trajectory

CPU = torch.device("cpu")
PRESET = PRESETS["gppo"]
RESOLVED = ResolvedObjective(
    "mask", PRESET.cell, PRESET.advantage, PRESET.aggregation, 1, 4.0, None, "rollout", corrections=(), auxiliary=()
)
OBJECTIVE = PolicyGradient(TrustRegion(RESOLVED.cell), RESOLVED.ratio_cap)


@dataclass(frozen=True)
class Timed:
    """The diagnosed objective, with the seconds that it takes beyond the plain one."""

    given: Diagnostics
    seconds: list[float] = field(default_factory=list)

    def __call__(self, streams: TokenStreams) -> TokenLoss:
        plain = OBJECTIVE(streams)
        objective = diagnosed(lambda _: plain, RESOLVED, self.given)
        start = time.process_time()
        result = objective(streams)
        self.seconds.append(time.process_time() - start)
        return replace(result, seen=None if result.seen is None else TimedSeen(result.seen, self.seconds))


@dataclass(frozen=True)
class TimedSeen:
    """What a micro-batch keeps, with the seconds that the look at the whole step takes."""

    seen: Seen
    seconds: list[float]

    def measure(self, step: "Sequence[TimedSeen]") -> Mapping[str, Metric[torch.Tensor]]:
        start = time.process_time()
        metrics = self.seen.measure([one.seen for one in step])
        self.seconds.append(time.process_time() - start)
        return metrics


@dataclass(frozen=True)
class TimedDivergence:
    """The exact divergence, with the seconds that it takes."""

    divergence: HeadDivergence
    seconds: list[float] = field(default_factory=list)

    def __call__(self, rows: HeadRows, statistics: TokenStatistics, batch: MicroBatch) -> torch.Tensor:
        start = time.process_time()
        result = self.divergence(rows, statistics, batch)
        self.seconds.append(time.process_time() - start)
        return result


def model_folder(arguments: argparse.Namespace, folder: Path) -> Path:
    """A random Qwen3."""
    config = transformers.Qwen3Config(
        vocab_size=arguments.vocab, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers, num_attention_heads=8, num_key_value_heads=4,
        head_dim=arguments.hidden // 8, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def batch_of(arguments: argparse.Namespace) -> TrainBatch:
    """Random answers, every token but the first with loss, in micro-batches of eight sequences."""
    random = np.random.default_rng(1)
    length = arguments.length

    def trajectory(reward: float) -> Trajectory:
        trainable = np.ones(length, dtype=np.bool_)
        trainable[0] = False
        return Trajectory(
            token_ids=random.integers(0, arguments.vocab, length),
            sampler_logprobs=np.where(trainable, random.normal(-9, 0.1, length), 0).astype(np.float32),
            trainable=trainable,
            policy_versions=np.zeros(length, dtype=np.int64),
            finish="stop",
            verdict=Verdict(reward, Status.GRADED),
        )

    members = tuple(trajectory(float(place % 2)) for place in range(arguments.sequences))
    group = Group(Prompt("0", (1,), Task("none", {})), members)
    packer = Packer(1, 8 * length, "token_mean", None, Alone())
    (batch,) = packer.pack([group], [[member.verdict.score - 0.5 for member in members]])  # type: ignore[operator]
    return batch


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("hidden", 256), ("layers", 4), ("vocab", 8192), ("sequences", 32), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--exact-sample", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, topology(Parallel(), CPU, 1, 60):
        path = model_folder(arguments, Path(folder))
        architecture = read_architecture(path)
        chunks = build_model(transformer_config(architecture, Parallel(), CPU, torch.float32, {}), architecture, CPU)
        load(chunks, architecture, HfReader(path))
        model, optimizer = loaded_model(chunks, architecture, 1.0, CPU), Optimizer(lr=1e-6)
        exact = TimedDivergence(ExactDivergence(TrustRegion(RESOLVED.cell).generator))
        batch = batch_of(arguments)
        print(f"{batch.tokens} tokens with loss in {len(batch.micro_batches)} micro-batches")
        alone = compare(MegatronPolicy(model, optimizer, 1000), batch, Diagnostics(), arguments.steps)
        policy = MegatronPolicy(model, optimizer, 1000, exact=exact)
        start = time.process_time()
        scored = policy.score([AnchorLogprobs(), OwnRows(sampled_here=True, count=arguments.exact_sample)], batch)
        scoring = time.process_time() - start
        sampled = Diagnostics(exact_sample=arguments.exact_sample)
        compared = compare(policy, scored, sampled, arguments.steps, exact.seconds)
    print(f"without diagnostics: {1000 * alone.plain:8.1f} ms a step")
    print(f"with    diagnostics: {1000 * alone.diagnosed:8.1f} ms a step")
    print(f"the diagnostics themselves: {100 * alone.share:.2f} % of the optimizer step")
    print(
        f"with the exact divergence of {arguments.exact_sample} tokens a micro-batch: {100 * compared.share:.2f} %; "
        f"the scoring pass, which anchor: recomputed has anyway: {100 * scoring / compared.plain:.0f} %"
    )


class Cost(NamedTuple):
    """Median seconds of an optimizer step without and with the diagnostics, and their own share of the latter."""

    plain: float
    diagnosed: float
    share: float


def compare(
    policy: MegatronPolicy, batch: TrainBatch, given: Diagnostics, steps: int, further: list[float] | None = None
) -> Cost:
    """further: seconds that the head spends for the diagnostics, growing as they are spent; in the plain steps too."""
    timed, further = Timed(given), [] if further is None else further
    plain, whole, shares = [], [], []
    for _ in range(steps + 1):
        further.clear()
        plain.append(seconds_of(policy, batch, OBJECTIVE))
        plain[-1] -= sum(further)
        further.clear()
        timed.seconds.clear()
        whole.append(seconds_of(policy, batch, timed))
        shares.append((sum(timed.seconds) + sum(further)) / whole[-1])
    return Cost(*(statistics.median(values[1:]) for values in (plain, whole, shares)))


def seconds_of(policy: MegatronPolicy, batch: TrainBatch, objective: Objective) -> float:
    start = time.process_time()
    policy.update(batch, objective)
    return time.process_time() - start


if __name__ == "__main__":
    main()
