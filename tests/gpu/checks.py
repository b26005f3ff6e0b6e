"""The checks. Each takes a device, so that what they do can be tried on a CPU as far as it is able."""

import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import transformers

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.schema import Fp8, Memory, Parallel, Precision
from gppo_megatron.data.packing import Packer
from gppo_megatron.errors import ConfigError
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS
from gppo_megatron.objective.trust_region import TrustRegion
from gppo_megatron.policy.megatron import head
from gppo_megatron.policy.megatron.arrangement import Arrangement, EndToEnd, Shares, SideBySide
from gppo_megatron.policy.megatron.head import TokenStatistics, VocabShard, token_statistics
from gppo_megatron.policy.megatron.head_chunk import Scratch, TorchScratch, scratch_of
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import HAVE_TRANSFORMER_ENGINE, build_model, transformer_config
from gppo_megatron.policy.megatron.precision import DTYPES, check_device
from gppo_megatron.policy.megatron.topology import topology
from gppo_megatron.policy.megatron.update import MegatronPolicy, loaded_model
from gppo_megatron.policy.megatron.weights import load
from gppo_megatron.types import Alone, MicroBatch, TrainBatch
from gppo_megatron.weight_sync.distributed import free_port
from gppo_megatron.weight_sync.group import broadcast, process_group
from tests.distributed.layouts import OPTIMIZER, TEMPERATURE, advantage_of, groups_of
from tests.distributed.reference import aggregate, from_folder, gppo_losses, relative, trajectories_of
from tests.gpu.verdicts import Skipped

VOCAB = 512
GPPO = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
BYTES = 2**24
"""Of a broadcast."""


@dataclass(frozen=True)
class Step:
    """Of one optimizer step: its loss, and the gradient's norm before clipping."""

    loss: float
    norm: float

    def distance(self, other: "Step") -> float:
        """The larger relative difference."""
        pairs = ((self.loss, other.loss), (self.norm, other.norm))
        return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


@contextmanager
def model_folder() -> Iterator[Path]:
    """A Qwen3 whose widths FP8 takes, with log-probs far from uniform."""
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.06, generator=generator)
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        yield Path(name)


def batch() -> TrainBatch:
    groups = groups_of(VOCAB)
    advantages = [[advantage_of(trajectory) for trajectory in group.trajectories] for group in groups]
    (packed,) = Packer(1, 64, "token_mean", None, Alone()).pack(groups, advantages)
    return packed


def policy_of(
    folder: Path,
    device: torch.device,
    precision: Precision,
    arrange: Callable[[Shares], Arrangement] = EndToEnd,
) -> MegatronPolicy:
    architecture = read_architecture(folder)
    config = transformer_config(
        architecture, Parallel(), device, DTYPES[precision.dtype], {}, Memory(), fp8=precision.fp8
    )
    chunks = build_model(config, architecture, device)
    load(chunks, architecture, HfReader(folder))
    return MegatronPolicy(loaded_model(chunks, architecture, TEMPERATURE, device, arrange), OPTIMIZER, 10)


def step(folder: Path, device: torch.device, precision: Precision) -> Step:
    numbers = policy_of(folder, device, precision).update(batch(), GPPO).flat()
    return Step(numbers["loss/total"], numbers["optimizer/grad_norm"])


def step_of_transformers(folder: Path) -> Step:
    """In float32, on the CPU."""
    model = from_folder(folder)
    loss = aggregate(list(gppo_losses(model, trajectories_of(VOCAB))), "token_mean", None)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return Step(float(loss.detach()), math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))


@contextmanager
def one_process(device: torch.device) -> Iterator[Path]:
    with topology(Parallel(), device, seed=1, timeout_seconds=300), model_folder() as folder:
        yield folder


def step_against_transformers(dtype: str, tolerance: float, device: torch.device) -> str:
    """A step of the policy is that of transformers on the CPU in float32."""
    precision = Precision(dtype)  # type: ignore[arg-type]
    possible(precision, device)
    with one_process(device) as folder:
        theirs, ours = step_of_transformers(folder), step(folder, device, precision)
    return within(ours.distance(theirs), tolerance, f"loss {ours.loss:.6f}, norm {ours.norm:.6f}")


def fp8_step_against_bfloat16(fp8: Fp8, tolerance: float, device: torch.device) -> str:
    """A step with FP8 products is near that without, and is not that one."""
    precision = Precision("bfloat16", fp8)
    possible(precision, device)
    with one_process(device) as folder:
        plain = step(folder, device, Precision("bfloat16"))
        ours = step(folder, device, precision)
    assert ours != plain, "the same numbers as without FP8: no product was in FP8"
    return within(ours.distance(plain), tolerance, f"loss {ours.loss:.6f}, norm {ours.norm:.6f}")


def packed_against_padded(device: torch.device) -> str:
    """Sequences end to end (Transformer Engine's THD) score as side by side, and no sequence sees another."""
    precision = Precision("bfloat16")
    possible(precision, device)
    if not HAVE_TRANSFORMER_ENGINE:
        raise Skipped("Transformer Engine is not installed")
    with one_process(device) as folder:
        packed, padded = (policy_of(folder, device, precision, arrange) for arrange in (EndToEnd, SideBySide))
        (first, *_) = batch().micro_batches
        ours, theirs = scores(packed, first), scores(padded, first)
        start = first.lengths[0]
        other = replace(first, tokens_T=torch.cat([(first.tokens_T[:start] + 7) % VOCAB, first.tokens_T[start:]]))
        moved = scores(packed, other)
    assert torch.equal(moved[start:], ours[start:]), "another sequence's tokens changed this one's log-probs"
    assert not torch.equal(moved[:start], ours[:start]), "its own tokens did not change the first one's"
    return within(float((ours - theirs).abs().max()), 0.1, "largest gap of a token's log-prob")


def scores(policy: MegatronPolicy, micro: MicroBatch) -> torch.Tensor:
    return policy.annotate(TrainBatch((micro,), 1, 1)).micro_batches[0].anchor_logprobs_T


def triton_head_against_torch(device: torch.device) -> str:
    """Statistics and gradients of the head's two paths, in float32."""
    triton = scratch_of(device, torch.float32)
    if triton is TorchScratch:
        raise Skipped("Triton is not installed, or the GPU is older than compute capability 8.0")
    theirs, their_gradients = head_run(device, TorchScratch)
    ours, our_gradients = head_run(device, triton)
    worst = max(
        *(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)),
        *(relative(a, b) for a, b in zip(our_gradients, their_gradients, strict=True)),
    )
    return within(worst, 1e-4, "largest difference of a statistic or a gradient")


def head_run(device: torch.device, scratch: type[Scratch]) -> tuple[TokenStatistics, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    hidden_NH = torch.randn(300, 64, generator=generator).to(device).requires_grad_()
    weight_VH = torch.randn(5001, 64, generator=generator).to(device).requires_grad_()
    labels_N = torch.randint(5001, (300,), generator=generator).to(device)
    chosen, head.scratch_of = head.scratch_of, lambda *_: scratch
    try:
        statistics = token_statistics(hidden_NH, weight_VH, labels_N, VocabShard(0, 5001, None), 0.7)
        loss = sum(values_N.sum() for values_N in statistics[:4])
        return statistics, torch.autograd.grad(loss, (hidden_NH, weight_VH))
    finally:
        head.scratch_of = chosen


def nccl_weight_sync(device: torch.device) -> str:
    """Bytes broadcast from one GPU to another, through the group in which weights reach servers."""
    if torch.cuda.device_count() < 2:
        raise Skipped("NCCL needs two GPUs for two processes, and there is one")
    port = free_port()
    peer = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.gpu.nccl_peer", str(port)], stdout=subprocess.PIPE, text=True
    )
    try:
        with process_group("127.0.0.1", port, 0, 2, "gppo", "nccl", 120) as group:
            sent = payload().to(device)
            broadcast(sent, group)
            said, _ = peer.communicate(timeout=120)
    finally:
        peer.kill()
    assert said.strip() == checksum(payload()), f"the other GPU received other bytes: {said.strip()}"
    return f"{BYTES} bytes arrived"


def payload() -> torch.Tensor:
    return torch.randint(256, (BYTES,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def checksum(tensor: torch.Tensor) -> str:
    """Of the bytes and their order."""
    places = torch.arange(1, len(tensor) + 1)
    return str(int((tensor.cpu().long() * places).sum()))


def possible(precision: Precision, device: torch.device) -> None:
    """Raises Skipped where the device cannot compute in these numbers."""
    try:
        check_device(precision, device, HAVE_TRANSFORMER_ENGINE)
    except ConfigError as error:
        raise Skipped(str(error)) from error


def within(distance: float, tolerance: float, said: str) -> str:
    assert distance <= tolerance, f"{said}: off by {distance:.2g}, more than {tolerance:g}"
    return f"{said}: off by {distance:.2g} (at most {tolerance:g})"


CHECKS: dict[str, Callable[[torch.device], str]] = {
    "float32 step": partial(step_against_transformers, "float32", 1e-3),
    "bfloat16 step": partial(step_against_transformers, "bfloat16", 5e-2),
    "FP8 step, delayed": partial(fp8_step_against_bfloat16, Fp8("delayed"), 0.15),
    "FP8 step, tensorwise": partial(fp8_step_against_bfloat16, Fp8("tensorwise"), 0.15),
    "FP8 step, blockwise": partial(fp8_step_against_bfloat16, Fp8("blockwise", "e4m3"), 0.15),
    "FP8 step, mxfp8": partial(fp8_step_against_bfloat16, Fp8("mxfp8", "e4m3"), 0.15),
    "Triton head": triton_head_against_torch,
    "packing (THD)": packed_against_padded,
    "NCCL weight sync": nccl_weight_sync,
}
