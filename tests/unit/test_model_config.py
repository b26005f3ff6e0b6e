"""What the run's `megatron:` and `device:` may not be."""

from typing import Any

import pytest
import torch

from gppo_megatron.config.architecture import architecture_of
from gppo_megatron.config.schema import Parallel, TinyModel
from gppo_megatron.errors import ConfigError
from gppo_megatron.policy.megatron.model import FIXED, transformer_config
from gppo_megatron.policy.megatron.platform import CPU, device_of


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
    [{"recompute_granularity": "some"}, {"recompute_granularity": "full"}, {"fp8": "e4m3", "fp4": "e2m1"}],
)
def test_a_value_megatron_refuses_is_an_error_of_the_configuration(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Megatron-Core refuses this configuration: .*\S"):
        configured(**extra)


def test_cuda_without_a_gpu_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("cpu") == CPU
    with pytest.raises(ConfigError, match=r"device: cuda, but torch sees no GPU here; set device: cpu"):
        device_of("cuda")
