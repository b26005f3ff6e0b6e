"""One optimizer step in one process: against transformers (SDPA) with torch's AdamW, and packed against padded.

    python -m benchmarks.train_step [--rounds 5]

Both sides take the same weights, tokens, loss (the surrogate -A r log pi of every token that is no prompt) and fp32
on one thread. Padded is measured twice: sequences of like length side by side, as `batch.arrangement: padded` puts
them, and eight at a time in the order they came, as a plain loop does. Seconds are the process's own (CPU time), both
sides take turns, and a ratio is the median over rounds: most other work on the machine falls out.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from gppo_verifiers.types import Status, Task, Verdict

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.derived import linear_work
from gppo_megatron.config.schema import Optimizer, Parallel
from gppo_megatron.data.balance import PackedRoom, PaddedRoom, Room, Work
from gppo_megatron.data.packing import Packer
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron.arrangement import Arrangement, EndToEnd, Shares, SideBySide
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.topology import topology
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.types import Alone, Group, Prompt, TrainBatch, Trajectory

VOCAB = 8192
BUDGET, ROWS = 1024, 8
SIGMA = 1.0
"""Of the logarithm of lengths: their p99 is exp(2.33 x SIGMA) = 10 times their median."""

Step = Callable[[], object]


class Ratio(NamedTuple):
    """Seconds of one step, medians, and the median of `reference / ours` within a round: above 1, ours is faster."""

    ours: float
    reference: float
    speed: float


def model_folder(folder: Path) -> Path:
    """A random Qwen3 of 10 million parameters."""
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def group_of(lengths: Sequence[int], prompt: int) -> Group:
    random = np.random.Generator(np.random.Philox(key=1))
    trajectories = []
    for length in lengths:
        trainable = np.arange(length) >= prompt
        trajectories.append(
            Trajectory(
                token_ids=random.integers(0, VOCAB, length),
                sampler_logprobs=np.where(trainable, -np.log(VOCAB), 0).astype(np.float32),
                trainable=trainable,
                policy_versions=np.where(trainable, 0, -1),
                finish="stop",
                verdict=Verdict(1.0, Status.GRADED),
            )
        )
    return Group(Prompt("p", (1,), Task("none")), tuple(trajectories))


def batch_of(lengths: Sequence[int], room: Room, work: Work, prompt: int = 1, budget: int = BUDGET) -> TrainBatch:
    """prompt: how many of each sequence's tokens are not trained on."""
    packer = Packer(1, budget, "token_mean", None, Alone(), room=room, work=work)
    (batch,) = packer.pack([group_of(lengths, prompt)], [(1.0,) * len(lengths)])
    return batch


def in_order(lengths: Sequence[int], work: Work) -> TrainBatch:
    """ROWS sequences a micro-batch as they came; shares are of the micro-batch, which changes no time."""
    parts = [
        batch_of(lengths[start : start + ROWS], PaddedRoom(), work, budget=ROWS * BUDGET).micro_batches
        for start in range(0, len(lengths), ROWS)
    ]
    return TrainBatch(tuple(micro for part in parts for micro in part), sum(lengths) - len(lengths), len(lengths))


def our_step(folder: Path, batch: TrainBatch, arrange: Callable[[Shares], Arrangement]) -> Step:
    architecture = read_architecture(folder)
    chunks = build_model(transformer_config(architecture, Parallel(), CPU, torch.float32, {}), architecture, CPU)
    load(chunks, architecture, HfReader(folder))
    policy = MegatronPolicy(loaded_model(chunks, architecture, 1.0, CPU, arrange), Optimizer(lr=1e-5), 1000)
    objective = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
    return lambda: policy.update(batch, objective)


def plain_step(folder: Path, batch: TrainBatch) -> Step:
    """The usual loop: padded rows, logits of every token, log-softmax, AdamW, clipping."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)

    def step() -> None:
        optimizer.zero_grad()
        for micro in batch.micro_batches:
            rows = [torch.split(tensor_T, list(micro.lengths)) for tensor_T in (micro.tokens_T, micro.labels_T)]
            tokens_BS, labels_BS = (torch.nn.utils.rnn.pad_sequence(list(row), batch_first=True) for row in rows)
            share_BS, sampled_BS = (
                torch.nn.utils.rnn.pad_sequence(list(torch.split(tensor_T, list(micro.lengths))), batch_first=True)
                for tensor_T in (micro.share_T, micro.sampler_logprobs_T)
            )
            logits_BSV = model(tokens_BS, use_cache=False).logits
            logprobs_BS = logits_BSV.log_softmax(-1).gather(-1, labels_BS[..., None]).squeeze(-1)
            ratio_BS = (logprobs_BS - sampled_BS).detach().exp()
            (-(ratio_BS * logprobs_BS * share_BS).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def compare(ours: Step, reference: Step, rounds: int) -> Ratio:
    """After one round of warm-up."""
    pairs = []
    for _ in range(rounds + 1):
        seconds = []
        for step in (ours, reference):
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
        pairs.append(seconds)
    mine, theirs = zip(*pairs[1:], strict=True)
    speeds = [reference / ours for ours, reference in pairs[1:]]
    return Ratio(statistics.median(mine), statistics.median(theirs), statistics.median(speeds))


def lognormal_lengths(count: int, median: int) -> list[int]:
    random = np.random.Generator(np.random.Philox(key=2))
    return [int(value) for value in np.clip(random.lognormal(np.log(median), SIGMA, count), 4, BUDGET)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each, default 5")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, topology(Parallel(), CPU, seed=1, timeout_seconds=60):
        folder = model_folder(Path(temporary))
        work = Work(linear_work(read_architecture(folder)))
        for prompt in (1, 64):
            equal = batch_of([256] * 16, PackedRoom(), work, prompt)
            ratio = compare(our_step(folder, equal, EndToEnd), plain_step(folder, equal), rounds)
            print(f"16 x 256 tokens, {prompt} of each a prompt")
            show("ours", "transformers", ratio)
        lengths = lognormal_lengths(96, median=48)
        spread = np.percentile(lengths, 99) / np.median(lengths)
        print(f"{len(lengths)} lognormal lengths, {sum(lengths)} tokens, p99 / median {spread:.1f}")
        packed = batch_of(lengths, PackedRoom(), work)
        for name, padded in (
            ("padded, like lengths", batch_of(lengths, PaddedRoom(), work)),
            ("padded, in order", in_order(lengths, work)),
        ):
            ratio = compare(our_step(folder, packed, EndToEnd), our_step(folder, padded, SideBySide), rounds)
            show("packed", name, ratio)


def show(ours: str, reference: str, ratio: Ratio) -> None:
    seconds = f"{ours} {ratio.ours:.2f} s, {reference} {ratio.reference:.2f} s"
    print(f"    {seconds:60} speed {ratio.speed:.2f} x", flush=True)


if __name__ == "__main__":
    main()
