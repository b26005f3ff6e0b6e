"""Sampling ahead of training against waiting for it, in one go: how long the trainer waits, and what it learns.

One `gppo serve-embedded` on one core, one trainer on another. A supervised start is made once; from there each seed is
run both ways, in turn. The trainer is idle while it neither updates nor prepares a batch: it waits for samples, or for
the server to take the weights.

    python -m benchmarks.async [--seeds 3] [--steps 20]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gppo_megatron.cli import main as main_of_gppo
from gppo_megatron.config.load import dump, load
from gppo_megatron.config.rollouts import SglangRollout
from gppo_megatron.config.schema import HfModel, Prefetch
from gppo_megatron.serving import command as serving_command
from gppo_megatron.serving.sampler import Sampler

RECIPE = "launchers/recipes/demo.yaml"
SMALL = (
    "parallel.tensor=1", "model.hidden=256", "model.layers=3", "model.ffn=768",
    "batch.sequences=128", "batch.updates=2", "batch.micro_batch_tokens=2048",
    "optimizer.schedule=constant", "optimizer.lr=1e-4", "warmup.optimizer.lr=1e-3",
    "evaluation.every=1000", "evaluation.samples=1", "evaluation.prompts=8", "save.checkpoint_every=0",
)  # fmt: skip
CONTEXT = 64
PIECE = 2
"""Tokens that the server samples of each response before it can take weights: a third of an answer, as it would be a
small part of a real one."""


@dataclass(frozen=True)
class Outcome:
    """reward: mean over the last quarter of the steps. idle: share of the steps' time; seconds: of a step.

    waiting, publishing: seconds of a step. staleness: optimizer steps.
    """

    reward: float
    idle: float
    seconds: float
    waiting: float
    publishing: float
    staleness: float


@contextmanager
def server(folder: Path, core: int) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.async", "--serve", str(folder)]
    os.sched_setaffinity(0, {core})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split(" at ")[1].strip()
        finally:
            process.terminate()


def serve(folder: str) -> int:
    """What `gppo serve-embedded` does, in smaller pieces than its own."""
    serving_command.Sampler = partial(Sampler, tokens_a_piece=PIECE)  # type: ignore[misc,assignment]
    return main_of_gppo(["serve-embedded", folder, "--port", "0", "--context", str(CONTEXT)])


def warm_model(folder: Path) -> Path:
    """A model that answers some of the problems, as a Hugging Face folder."""
    config = replace(
        load(RECIPE, [*SMALL, "warmup.steps=80", "steps=1", "optimizer.lr=1e-9"]), run=str(folder / "warm")
    )
    file = folder / "warm.yaml"
    file.write_text(dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "gppo_megatron", "train", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "warm" / "hf"


def measured(folder: Path, model: Path, url: str, seed: int, lag: int, steps: int) -> Outcome:
    config = load(RECIPE, [*SMALL, f"seed={seed}", f"steps={steps}"])
    rollout = SglangRollout(config.rollout.max_new_tokens, (url,), CONTEXT, sync="disk")
    run = folder / f"seed-{seed}-lag-{lag}"
    config = replace(
        config, run=str(run), model=HfModel(str(model)), rollout=rollout, prefetch=Prefetch(lag), warmup=None
    )
    file = folder / f"{run.name}.yaml"
    file.write_text(dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "gppo_megatron", "train", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["stage"] == "train" and line["step"] > 0]
    last = trained[-max(1, steps // 4) :]
    mean = {name: statistics.fmean(line[f"time/{name}"] for line in trained) for name in ("step", "rollout", "publish")}
    return Outcome(
        reward=statistics.fmean(line["rollout/reward"] for line in last),
        idle=(mean["rollout"] + mean["publish"]) / mean["step"],
        seconds=mean["step"],
        waiting=mean["rollout"],
        publishing=mean["publish"],
        staleness=statistics.fmean(line.get("prompts/staleness") or 0.0 for line in trained),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--serve", metavar="FOLDER", help="be the server")
    given = parser.parse_args()
    if given.serve:
        sys.exit(serve(given.serve))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two cores are needed, one for the server and one for the trainer")
    start = time.monotonic()
    outcomes: dict[int, list[Outcome]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as name:
        model = warm_model(Path(name))
        with server(model, cores[0]) as url:
            os.sched_setaffinity(0, {cores[1]})
            for seed in range(1, given.seeds + 1):
                for lag in (0, 1):
                    outcome = measured(Path(name), model, url, seed, lag, given.steps)
                    outcomes[lag].append(outcome)
                    print(
                        f"seed {seed}, max_lag {lag}: trainer idle {outcome.idle:.1%} of a step of "
                        f"{outcome.seconds:.2f} s (waits {outcome.waiting:.2f} s, publishes {outcome.publishing:.2f} "
                        f"s), final reward {outcome.reward:.4f}, tokens {outcome.staleness:.2f} optimizer steps old",
                        flush=True,
                    )
    print(f"in all {time.monotonic() - start:.0f} s")
    report(outcomes)


def report(outcomes: dict[int, list[Outcome]]) -> None:
    idle, seconds, rewards = (
        [[getattr(outcome, name) for outcome in outcomes[lag]] for lag in (0, 1)]
        for name in ("idle", "seconds", "reward")
    )
    difference = statistics.fmean(rewards[1]) - statistics.fmean(rewards[0])
    error = sum(statistics.variance(values) / len(values) for values in rewards) ** 0.5
    shares = [statistics.fmean(values) for values in idle]
    print(f"trainer idle: {shares[0]:.1%} of a step synchronous, {shares[1]:.1%} one step off")
    print(f"time of a step: x {statistics.fmean(seconds[1]) / statistics.fmean(seconds[0]):.2f}")
    print(f"final reward, one step off less synchronous: {difference:+.4f}, standard error {error:.4f}")
    holds = shares[1] < shares[0] and abs(difference) < 2 * error
    print("idle share falls, and rewards differ by less than 2 standard errors" if holds else "NOT as it should be")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
