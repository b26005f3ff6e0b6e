"""One supervised step on real problems in Megatron-Core, in one process: loss before and after, memory and speed.

    python examples/smollm2/one_step.py RUN.yaml [key=value ...]

The batch is the run's first problems with their reference answers. The step must lower the loss on its own batch.
"""

import resource
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import torch

from gppo_megatron.build import find_problems, model_path
from gppo_megatron.config.checks import check
from gppo_megatron.config.load import load as load_run
from gppo_megatron.config.schema import Optimizer, Parallel
from gppo_megatron.data.model_folder import open_folder
from gppo_megatron.data.packing import Packer
from gppo_megatron.errors import GppoError
from gppo_megatron.objective.policy_gradient import MaximumLikelihood
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.topology import topology
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.rollout.source import given_answer
from gppo_megatron.types import Alone, Group

SEQUENCES = 8
LEARNING_RATE = 1e-5


def main() -> int:
    parser = ArgumentParser(description="One supervised step on a run's first problems.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    try:
        return step(options.run, options.overrides)
    except GppoError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def step(path: str, overrides: list[str]) -> int:
    config = load_run(path, overrides)
    check(config, source=path)
    torch.set_num_threads(config.threads)
    folder = open_folder(model_path(config, Path(config.run)))
    prompts = find_problems(config, folder, speaks=True).train[:SEQUENCES]
    groups = [Group(prompt, (given_answer(prompt),)) for prompt in prompts]
    (batch,) = Packer(1, config.batch.micro_batch_tokens, "token_mean", None, Alone()).pack(
        groups, [(1.0,)] * len(groups)
    )
    tokens = sum(len(micro.tokens_T) for micro in batch.micro_batches)
    with topology(Parallel(), CPU, config.seed, timeout_seconds=600):
        architecture = folder.architecture
        chunks = build_model(transformer_config(architecture, Parallel(), CPU, torch.float32, {}), architecture, CPU)
        load(chunks, architecture, HfReader(folder.path))
        model = loaded_model(chunks, architecture, temperature=1.0, device=CPU)
        policy = MegatronPolicy(model, Optimizer(lr=LEARNING_RATE), optimizer_steps=2)
        start = time.perf_counter()
        before = policy.update(batch, MaximumLikelihood()).flat()["loss/total"]
        seconds = time.perf_counter() - start
        after = policy.update(batch, MaximumLikelihood()).flat()["loss/total"]  # measured before its own step
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"loss {before:.4f} -> {after:.4f} after one step on its own batch; {tokens} tokens in {seconds:.1f} s = "
        f"{tokens / seconds:.0f} tokens/s; at most {memory:.1f} GiB of memory"
    )
    return 0 if after < before else 1


if __name__ == "__main__":
    sys.exit(main())
