"""Time and peak memory of the LM head, forward and backward: this project's against what others do in its place.

`python benchmarks/head.py [--rounds 5] [--hidden 256 2048]` prints a table for each hidden size. Every contender runs
in a process of its own; the rounds go through the contenders in turn. Seconds are the process's own, user and system,
of all rounds but the first: what other work takes of a busy machine does not count. Peaks are above the inputs and of
the first round, as the process keeps memory that it has freed. The fused head adds to a `main_grad` that is there
before, as under Megatron's DDP, where the others leave a gradient to be added.
Needs verl and Megatron-Core 0.16.1 in one environment, the one that `make test-external` builds. Linux.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

from gppo_megatron.policy.megatron.head import VocabShard, token_statistics

ROWS, VOCAB = 4096, 32768
TRL_ROWS = 128
WARM_ROWS, WARM_VOCAB, WARM_HIDDEN = 300, 500, 8
MIB = 2**20

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden_NH, weight_VH, labels_N) -> the mean over rows of what the contender computes, to go backward through."""


def fused_logprob(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    return token_statistics(hidden_NH, weight_VH, labels_N, VocabShard(0, len(weight_VH), None), 1.0).logprobs_N.mean()


def fused_entropy(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    ours = token_statistics(hidden_NH, weight_VH, labels_N, VocabShard(0, len(weight_VH), None), 1.0)
    return (ours.logprobs_N + ours.entropy_N).mean()


def fused_all(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    ours = token_statistics(hidden_NH, weight_VH, labels_N, VocabShard(0, len(weight_VH), None), 1.0)
    return (ours.logprobs_N + ours.entropy_N + ours.squares_N).mean()


def megatron(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    logits_NV = hidden_NH @ weight_VH.t()
    return -vocab_parallel_cross_entropy(logits_NV[:, None], labels_N[:, None]).mean()


def verl(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """As its Megatron engine does: the entropy of the logits over the temperature, the log-prob of a copy of them."""
    logits_1NV = (hidden_NH @ weight_VH.t())[None].div_(1.0)
    copy_1NV = logits_1NV.clone()
    entropy_1N = vocab_parallel_entropy(logits_1NV)
    return (vocab_parallel_log_probs_from_logits(copy_1NV, labels_N[None]) + entropy_1N).mean()


def trl_style(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """All logits; log_softmax and entropy of a few rows at a time, by autograd."""
    logits_NV = hidden_NH @ weight_VH.t()
    logprobs, entropies = [], []
    for logits_CV, labels_C in zip(logits_NV.split(TRL_ROWS), labels_N.split(TRL_ROWS), strict=True):
        logprobs_CV = torch.log_softmax(logits_CV, 1)
        logprobs.append(logprobs_CV.gather(1, labels_C[:, None]).squeeze(1))
        entropies.append(-(logprobs_CV.exp() * logprobs_CV).sum(1))
    return (torch.cat(logprobs) + torch.cat(entropies)).mean()


MEGATRON, VERL = "Megatron-Core vocab_parallel_cross_entropy: log-prob", "verl: log-prob, entropy"
TRL = "TRL-style chunked log_softmax: log-prob, entropy"
LOGPROB, ENTROPY = "fused head: log-prob", "fused head: log-prob, entropy"
CONTENDERS: dict[str, Loss] = {
    MEGATRON: megatron,
    LOGPROB: fused_logprob,
    VERL: verl,
    TRL: trl_style,
    ENTROPY: fused_entropy,
    "fused head: log-prob, entropy, sum p^2": fused_all,
}
OTHERS = {MEGATRON: LOGPROB, VERL: ENTROPY, TRL: ENTROPY}
"""Which of ours computes the same."""


def inputs(rows: int, vocab: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(rows, hidden, generator=generator).requires_grad_()
    weight_VH = torch.empty(vocab, hidden).normal_(0, 2 * hidden**-0.5, generator=generator).requires_grad_()
    return hidden_NH, weight_VH, torch.randint(vocab, (rows,), generator=generator)


def status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def serve(contender: Loss, hidden: int) -> None:
    """One pass for each line read. Answers with its seconds, the MiB it took above what was there before, and the
    largest element of each gradient, to see that contenders agree."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    contender(*inputs(WARM_ROWS, WARM_VOCAB, WARM_HIDDEN)).backward()  # compilers and libraries before any reading
    hidden_NH, weight_VH, labels_N = inputs(ROWS, VOCAB, hidden)
    sums_itself = contender not in (megatron, verl, trl_style)
    main_grad_VH = torch.zeros_like(weight_VH)
    if sums_itself:
        weight_VH.main_grad = main_grad_VH  # type: ignore[attr-defined]
    print("ready", flush=True)
    for _ in sys.stdin:
        hidden_NH.grad = weight_VH.grad = None
        main_grad_VH.zero_()
        before = status_mib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        start = time.process_time()
        contender(hidden_NH, weight_VH, labels_N).backward()
        seconds = time.process_time() - start
        peak = status_mib("VmHWM") - before
        assert hidden_NH.grad is not None
        assert weight_VH.grad is not None
        gradient_VH = main_grad_VH if sums_itself else weight_VH.grad
        print(seconds, peak, float(gradient_VH.abs().max()), float(hidden_NH.grad.abs().max()), flush=True)


def measure(hidden: int, rounds: int, names: Sequence[str]) -> dict[str, list[list[float]]]:
    """Of each contender and round: what `serve` answers."""
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--serve", name, "--hidden", str(hidden)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    results: dict[str, list[list[float]]] = {name: [] for name in names}
    try:
        for process in processes.values():
            assert process.stdout is not None
            while process.stdout.readline() != "ready\n":
                assert process.poll() is None
        for _ in range(rounds + 1):
            for name, process in processes.items():
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                results[name].append([float(number) for number in process.stdout.readline().split()])
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return results


def report(hidden: int, rounds: int, names: Sequence[str]) -> None:
    results = measure(hidden, rounds, names)
    seconds = {name: statistics.median(number[0] for number in numbers[1:]) for name, numbers in results.items()}
    peaks = {name: numbers[0][1] for name, numbers in results.items()}
    print(f"\nN={ROWS} H={hidden} V={VOCAB} float32, one thread; all logits are {ROWS * VOCAB * 4 // MIB} MiB")
    print(f"{'':52} {'seconds':>8} {'peak MiB':>9} {'largest d weight':>17} {'d hidden':>12}")
    for name, numbers in results.items():
        print(f"{name:52} {seconds[name]:8.2f} {peaks[name]:9.0f} {numbers[0][2]:17.6e} {numbers[0][3]:12.6e}")
    for name, ours in OTHERS.items():
        if {name, ours} <= set(results):
            pairs = zip(results[ours][1:], results[name][1:], strict=True)
            ratio = statistics.median(mine[0] / theirs[0] for mine, theirs in pairs)
            print(f"{ours} / {name}: time {ratio:.2f}, peak {peaks[ours] / peaks[name]:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, help="these contenders")
    parser.add_argument("--serve", choices=CONTENDERS)
    options = parser.parse_args()
    if options.serve:
        serve(CONTENDERS[options.serve], options.hidden[0])
        return
    for hidden in options.hidden:
        report(hidden, options.rounds, options.only)


if __name__ == "__main__":
    main()
