"""Peak memory and time of the LM head, forward and backward: all logits and log_softmax against the fused head.

`python benchmarks/head_memory.py` prints a table; every line is measured in a process of its own. Linux.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gppo_megatron.policy.megatron import head
from gppo_megatron.policy.megatron.head import TokenStatistics, VocabShard, rows_that_fit, token_statistics

ROWS, HIDDEN, VOCAB = 2048, 576, 49152
PASSES = 3
MIB = 2**20

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], TokenStatistics]


def plain(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> TokenStatistics:
    """All logits, and what autograd keeps of them."""
    logits_NV = hidden_NH @ weight_VH.t()
    logprobs_NV = torch.log_softmax(logits_NV, 1)
    probs_NV = logprobs_NV.exp()
    return TokenStatistics(
        logprobs_NV.gather(1, labels_N[:, None]).squeeze(1),
        torch.logsumexp(logits_NV, 1),
        -(probs_NV * logprobs_NV).sum(1),
        probs_NV.square().sum(1),
    )


def plain_logprob(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> TokenStatistics:
    """The label's log-prob and nothing else; the other statistics are its zeros."""
    logprobs_NV = torch.log_softmax(hidden_NH @ weight_VH.t(), 1)
    logprobs_N = logprobs_NV.gather(1, labels_N[:, None]).squeeze(1)
    return TokenStatistics(logprobs_N, *(torch.zeros_like(logprobs_N) for _ in range(3)))


def fused(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> TokenStatistics:
    return token_statistics(hidden_NH, weight_VH, labels_N, VocabShard(0, VOCAB, None), 1.0)


@dataclass(frozen=True)
class Variant:
    """every_statistic: whether the loss uses all four statistics, or the log-prob alone."""

    name: str
    run: Head
    every_statistic: bool


VARIANTS = (
    Variant("logits and log_softmax, log-prob", plain_logprob, False),
    Variant("fused head, log-prob", fused, False),
    Variant("logits and log_softmax, all four", plain, True),
    Variant("fused head, all four", fused, True),
)


@dataclass(frozen=True)
class Measurement:
    """peak_mib: above what the inputs take, both gradients included. seconds: the fastest pass.

    largest_gradient: of the weight, to see that the variants compute the same.
    """

    peak_mib: float
    seconds: float
    largest_gradient: float


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def measure(variant: Variant) -> Measurement:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    weight_VH = torch.empty(VOCAB, HIDDEN).normal_(0, 0.1, generator=generator).requires_grad_()
    labels_N = torch.randint(VOCAB, (ROWS,), generator=generator)
    (torch.ones(64, 64) @ torch.ones(64, 64)).exp()  # libraries loaded before the first reading
    before = resident_mib()
    peak, seconds = 0.0, []
    for number in range(PASSES):
        hidden_NH.grad = weight_VH.grad = None
        start = time.perf_counter()
        statistics = variant.run(hidden_NH, weight_VH, labels_N)
        used = statistics if variant.every_statistic else statistics[:1]
        torch.stack([value.mean() for value in used]).sum().backward()
        seconds.append(time.perf_counter() - start)
        if number == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    assert weight_VH.grad is not None
    return Measurement(peak, min(seconds), float(weight_VH.grad.abs().max()))


def measured_apart(place: int) -> Measurement:
    output = subprocess.run([sys.executable, __file__, str(place)], check=True, capture_output=True, text=True).stdout
    return Measurement(**json.loads(output))


def main() -> None:
    rows = rows_that_fit(VOCAB, torch.float32)
    print(f"N={ROWS} H={HIDDEN} V={VOCAB} float32, one thread; all logits are {ROWS * VOCAB * 4 / MIB:.0f} MiB;")
    print(f"the fused head takes {rows} rows at a time ({head.SCRATCH_BYTES / MIB:.0f} MiB of scratch)\n")
    print(f"{'':34} {'peak MiB':>9} {'seconds':>9} {'largest d weight':>17}")
    for place, variant in enumerate(VARIANTS):
        result = measured_apart(place)
        print(f"{variant.name:34} {result.peak_mib:9.0f} {result.seconds:9.2f} {result.largest_gradient:17.8f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(vars(measure(VARIANTS[int(sys.argv[1])]))))
    else:
        main()
