"""What the run's `megatron:` and `device:` may not be."""

from typing import Any

import megatron.core.transformer.moe.moe_utils as moe_utils
import pytest
import torch

from gppo_megatron.config.architecture import architecture_of
from gppo_megatron.config.schema import Parallel, TinyModel
from gppo_megatron.errors import ConfigError
from gppo_megatron.policy.megatron.model import FIXED, transformer_config
from gppo_megatron.policy.megatron.platform import CPU, adapt, device_of


def configured(**extra: Any) -> Any:
    return transformer_config(architecture_of(TinyModel()), Parallel(), CPU, torch.float32, extra)


def test_a_field_of_megatron_passes_through() -> None:
    assert configured().deterministic_mode is False
    assert configured(deterministic_mode=True).deterministic_mode is True


def test_unknown_keys_and_our_own_are_listed_together() -> None:
    with pytest.raises(ConfigError) as error:
        configured(num_layers=3, recompute_granularty="full", layernorm_epsilon=1e-5, deterministic_mode=True)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("megatron.recompute_granularty: no such field of TransformerConfig")
    assert lines[1:] == [
        "megatron.num_layers: set by the run itself, not here",
        "megatron.layernorm_epsilon: set by the run itself, not here",
    ]


@pytest.mark.parametrize("key", sorted(FIXED))
def test_what_the_policy_does_not_implement_cannot_be_switched_on(key: str) -> None:
    with pytest.raises(ConfigError, match=f"megatron.{key}: "):
        configured(**{key: 2})


@pytest.mark.parametrize(
    "extra",
    [{"cpu_offloading": True, "cpu_offloading_num_layers": 99}, {"moe_router_padding_for_quantization": True}],
)
def test_a_value_megatron_refuses_is_an_error_of_the_configuration(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Megatron-Core refuses this configuration: .*\S"):
        configured(**extra)


def test_an_interleaved_pipeline_never_batches_its_messages() -> None:
    """Batched, two neighbours' two messages are taken for one another: wrong gradients and no error."""
    shape, interleaved = architecture_of(TinyModel(layers=4)), Parallel(pipeline=2, virtual_stages=2)
    config = transformer_config(shape, interleaved, CPU, torch.float32, {})
    assert (config.overlap_p2p_comm, config.batch_p2p_comm, config.variable_seq_lengths) == (True, False, False)
    for key in ("batch_p2p_comm", "overlap_p2p_comm", "variable_seq_lengths", "virtual_pipeline_model_parallel_size"):
        with pytest.raises(ConfigError, match=f"megatron.{key}: set by the run itself"):
            transformer_config(shape, interleaved, CPU, torch.float32, {key: True})


def test_pipeline_outputs_are_never_freed_while_gloo_sends_them() -> None:
    assert FIXED["deallocate_pipeline_outputs"] is False
    config = transformer_config(architecture_of(TinyModel()), Parallel(pipeline=2), CPU, torch.float32, {})
    assert config.deallocate_pipeline_outputs is False


def test_the_router_finds_the_name_it_tests() -> None:
    """Megatron-Core 0.16.1 without Transformer Engine never binds it: a NameError in every MoE layer."""
    adapt(CPU)
    assert moe_utils.te_general_gemm is None


def test_the_processes_and_memory_of_a_run_cannot_be_set_twice() -> None:
    keys = ("context_parallel_size", "sequence_parallel", "recompute_granularity", "tensor_model_parallel_size")
    for key in keys:
        with pytest.raises(ConfigError, match=f"megatron.{key}: set by the run itself"):
            configured(**{key: None})


def test_cuda_without_a_gpu_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("cpu") == CPU
    with pytest.raises(ConfigError, match=r"device: cuda, but torch sees no GPU here; set device: cpu"):
        device_of("cuda")
