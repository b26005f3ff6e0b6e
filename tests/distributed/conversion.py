"""A group of processes that takes one case after another: loads a converted checkpoint with Megatron's own loader,
compares weights and logits, and saves it again at the case's layout.

usage: conversion.py CASES; CASES: a pickled list of `Case`, all of as many processes as were started.
"""

import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling

from gppo_megatron.config.architecture import Architecture, read_architecture
from gppo_megatron.config.schema import Parallel
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, named_parameters, transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.shards import write_shards
from gppo_megatron.policy.megatron.topology import layout, world
from gppo_megatron.policy.megatron.weights import load

TOLERANCE = 2e-6


@dataclass(frozen=True)
class Case:
    """root: holds `hf`, `converted` and `expected`, transformers' tokens [B, S] and logits [B, S, vocabulary].

    saved: a folder to write.
    """

    root: Path
    parallel: Parallel
    saved: Path


def logits_of(module: Any, architecture: Architecture, tokens_BS: torch.Tensor) -> torch.Tensor | None:
    """[B, S, vocabulary] on the last pipeline stage, None on the others; hidden states travel stage by stage."""
    module.eval()  # Megatron-Core trains experts under tensor parallelism with sequence parallelism alone
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    if not parallel_state.is_pipeline_first_stage():
        hidden_SBH = torch.empty(*reversed(tokens_BS.shape), architecture.hidden)
        dist.recv(hidden_SBH, parallel_state.get_pipeline_model_parallel_prev_rank())
        module.set_input_tensor(hidden_SBH)
    with torch.no_grad():
        output: torch.Tensor = module(tokens_BS, positions_BS, None, runtime_gather_output=True)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return output[..., : architecture.vocab]


def run(case: Case) -> None:
    """Collective over a world of the case's size."""
    hf = case.root / "hf"
    architecture = read_architecture(hf)
    expected = torch.load(case.root / "expected", weights_only=True)
    with layout(case.parallel, seed=1, timeout_seconds=60):
        config = transformer_config(architecture, case.parallel, CPU, torch.float32, {})
        ours, theirs = (build_model(config, architecture, CPU, case.parallel) for _ in range(2))
        load(ours, architecture, HfReader(hf))
        state = theirs[0].module.sharded_state_dict(prefix="")
        dist_checkpointing.load(state, case.root / "converted", strict=StrictHandling.RAISE_UNEXPECTED)
        for (name, a), (_, b) in zip(named_parameters(ours), named_parameters(theirs), strict=True):
            assert torch.equal(a, b), name
        logits_BSV = logits_of(theirs[0].module, architecture, expected["tokens"])
        if logits_BSV is not None:
            exact = architecture.experts is None and case.parallel.tensor == 1
            difference = (logits_BSV - expected["logits"]).abs().max() / expected["logits"].abs().max()
            assert difference <= (0 if exact else TOLERANCE), difference
            print(f"logits differ by {difference:.1e} of the largest", end=" ")
        if dist.get_rank() == 0:
            case.saved.mkdir()
        dist.barrier()
        write_shards(case.saved, ours[0].module.sharded_state_dict(prefix=""), asynchronous=False)


def main(cases: list[Case]) -> None:
    torch.set_num_threads(1)
    with world(cases[0].parallel.processes, CPU, timeout_seconds=300):
        for case in cases:
            start = time.monotonic()
            run(case)
            print(f"{time.monotonic() - start:.1f} s {case.root.name} {case.parallel}", flush=True)


if __name__ == "__main__":
    main(pickle.loads(Path(sys.argv[1]).read_bytes()))
