"""Operations counted by hand, by torch's own counter on transformers' models, and in a step of the policy."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gppo_megatron.config.architecture import Architecture, Experts, read_architecture
from gppo_megatron.config.flops import forward_flops, training_flops
from gppo_megatron.metrics import StepMetrics
from gppo_megatron.policy.megatron.peak import peak_tflops
from gppo_megatron.policy.megatron.update import MegatronPolicy
from tests.distributed.reference import OPTIMIZER, VOCAB, batch_of, from_folder, random_model, trajectories_of
from tests.numeric.test_policy import GPPO
from tests.single_process import CPU, model_of, world_of_one


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def shape_of(experts: Experts | None) -> Architecture:
    return Architecture(
        "qwen3", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=3, ffn=10, vocab=7, tied=False, qk_norm=True,
        qkv_bias=False, norm_eps=1e-6, rope_theta=1e4, max_positions=64, experts=experts,
    )  # fmt: skip


def test_a_count_by_hand() -> None:
    """Sequences of 3 and 1 tokens, of which 2 reach the head."""
    # Weights of a layer: queries and output 8 x 12 each, keys and values 8 x 6 each; the MLP 3 x 8 x 10.
    layer = 96 + 96 + 48 + 48 + 240
    pairs = 1 + 2 + 3 + 1
    head = 2 * 2 * 8 * 7
    assert forward_flops(shape_of(None), [3, 1], 2) == 2 * (2 * 4 * layer + 2 * 2 * 12 * pairs) + head
    # One layer dense; in the other a token meets the router, 8 x 5, and 2 of 5 experts, 3 x 8 x 6 each.
    sparse = 96 + 96 + 48 + 48 + 40 + 2 * 144
    experts = Experts(count=5, per_token=2, ffn=6, normalized=True, dense=frozenset({0}))
    expected = 2 * 4 * (layer + sparse) + 2 * 2 * 2 * 12 * pairs + head
    assert forward_flops(shape_of(experts), [3, 1], 2) == expected
    assert training_flops(shape_of(experts), [3, 1], 2) == 3 * expected


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen2"])
def test_torch_counts_as_many(family: str, tmp_path: Path) -> None:
    """Torch counts attention to all keys, seen or not; it does not know the fused product of all experts."""
    random_model(family, tied=False).save_pretrained(tmp_path)
    shape, model, length = read_architecture(tmp_path), from_folder(tmp_path), 11
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as forward:
        loss = model(torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    unseen = 4 * shape.layers * shape.heads * shape.head_dim * (length * (length - 1) // 2)
    ours = forward_flops(shape, [length], length)
    assert forward.get_total_flops() == ours + unseen
    assert backward.get_total_flops() == 2 * (ours + unseen)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_step_reports_what_its_batch_takes(family: str, tmp_path: Path) -> None:
    random_model(family, tied=True).save_pretrained(tmp_path)
    trajectories = trajectories_of(VOCAB)
    lengths = [len(trajectory.token_ids) for trajectory in trajectories]
    rows = sum(int(trajectory.trainable.sum()) for trajectory in trajectories)
    for budget in (40, 4096):
        metrics: StepMetrics = MegatronPolicy(model_of(tmp_path), OPTIMIZER, 10).update(batch_of(budget), GPPO)
        expected = training_flops(read_architecture(tmp_path), lengths, rows)
        assert metrics.flat()["speed/update_flops"] == expected


def test_a_gpu_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA H200", 989.0),
        ("Something else", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_, name=name: name)
        assert peak_tflops(cuda, torch.bfloat16) == peak
    assert peak_tflops(cuda, torch.float32) is None
    assert peak_tflops(CPU, torch.bfloat16) is None
