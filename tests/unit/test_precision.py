"""`precision:` and `optimizer.state:` as Megatron-Core's own configuration objects, and what is refused why."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.core.fp8_utils as fp8_utils
import megatron.core.optimizer.optimizer_config as optimizer_module
import megatron.core.transformer.transformer_config as config_module
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fp8_utils import is_first_last_bf16_layer

from gppo_megatron.config.architecture import architecture_of
from gppo_megatron.config.checks import check
from gppo_megatron.config.layout import alignment
from gppo_megatron.config.numbers import Fp8, OptimizerState, Precision, Recipe
from gppo_megatron.config.schema import Memory, Optimizer, Parallel, RunConfig, TinyModel
from gppo_megatron.data.packing import filler
from gppo_megatron.errors import ConfigError
from gppo_megatron.policy.megatron import update
from gppo_megatron.policy.megatron.arrangement import EndToEnd, Shares, SideBySide
from gppo_megatron.policy.megatron.model import transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.precision import (
    CAPABILITY,
    check_device,
    optimizer_fields,
    reduction_fields,
    token_multiple,
)
from gppo_megatron.policy.megatron.update import optimizer_config
from tests.unit.test_config_checks import configure, problems

RECIPES: tuple[Recipe, ...] = ("delayed", "tensorwise", "blockwise", "mxfp8")
NAMES = Path(__file__).with_name("transformer_engine_names.json")
SHARED = Memory(distributed_optimizer=True)


def megatron(fp8: Fp8 | None, model: TinyModel = TinyModel(layers=4)) -> Any:  # noqa: B008 - frozen
    return transformer_config(architecture_of(model), Parallel(), CPU, torch.bfloat16, {}, fp8=fp8)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("parameters", [False, True])
def test_megatron_takes_every_recipe(recipe: Recipe, parameters: bool) -> None:
    spared = 0 if recipe == "delayed" else 1
    config = megatron(Fp8(recipe, "e4m3", parameters, first_layers=spared, last_layers=2 * spared))
    assert (config.fp8, config.fp8_recipe, config.fp8_param, config.bf16) == ("e4m3", recipe, parameters, True)
    assert config.moe_router_padding_for_quantization is False
    assert [is_first_last_bf16_layer(config, layer) for layer in range(4)] == (
        [False] * 4 if recipe == "delayed" else [True, False, True, True]
    )
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=True, **reduction_fields(config))
    assert reduction.fp8_param_gather is parameters
    assert reduction.reuse_grad_buf_for_mxfp8_param_ag is (parameters and recipe == "mxfp8")
    fields = optimizer_fields(config, OptimizerState())
    assert (fields["fp8_recipe"], fields["bf16"]) == (recipe, True)
    assert fields["reuse_grad_buf_for_mxfp8_param_ag"] is reduction.reuse_grad_buf_for_mxfp8_param_ag
    assert token_multiple(config) == fp8_utils.get_fp8_align_size(config.fp8_recipe)


@pytest.mark.filterwarnings("ignore:mxfp8 without using reuse_grad_buf")
@pytest.mark.parametrize("recipe", RECIPES)
def test_megatrons_optimizer_takes_every_recipe(recipe: Recipe) -> None:
    config = megatron(Fp8(recipe))
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=True, **reduction_fields(config))
    assert optimizer_config(Optimizer(), config, reduction).fp8_recipe == recipe


def test_without_fp8_no_field_of_it_is_on() -> None:
    config = megatron(None)
    assert (config.fp8, config.fp4, config.fp8_param, config.first_last_layers_bf16) == (None, None, False, False)
    assert token_multiple(config) == 1
    assert optimizer_fields(config, OptimizerState())["fp8_recipe"] is None


@pytest.mark.parametrize(
    "key",
    ["fp8", "fp8_param", "fp4", "first_last_layers_bf16", "fp8_dot_product_attention", "fp8_multi_head_attention"],
)
def test_there_is_one_way_to_say_it(key: str) -> None:
    with pytest.raises(ConfigError, match=f"megatron.{key}: set by the run itself, not here"):
        transformer_config(architecture_of(TinyModel()), Parallel(), CPU, torch.bfloat16, {key: None})


def test_each_experts_tokens_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "is_te_min_version", lambda *_, **__: True)
    config = megatron(Fp8(), TinyModel(experts=4))
    assert (config.moe_router_padding_for_quantization, config.moe_router_dtype) == (True, "fp32")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("arrangement", [EndToEnd, SideBySide])
def test_micro_batches_have_the_width_of_a_product(recipe: Recipe, arrangement: Any) -> None:
    parallel = Parallel(tensor=2, sequence=True, context=2)
    unit = token_multiple(megatron(Fp8(recipe)))
    grid = arrangement(Shares(context=2, rank=1, tensor=2, unit=unit)).place(filler())
    assert grid.tokens_BS.numel() / parallel.tensor % unit == 0
    assert grid.length * parallel.context == alignment(parallel, Fp8(recipe))


# Optimizer state


def test_narrow_state_is_megatrons_precision_aware_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    state = OptimizerState(mean="bfloat16", square="fp8", weights="float16")
    reduction = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with pytest.raises(ConfigError, match="optimizer.state: anything but float32 needs Transformer Engine, which is"):
        optimizer_config(Optimizer(state=state), megatron(None), reduction)
    monkeypatch.setattr(update, "HAVE_TRANSFORMER_ENGINE", True)
    monkeypatch.setattr(optimizer_module.OptimizerConfig, "__post_init__", lambda self: None)
    config = optimizer_config(Optimizer(state=state), megatron(None), reduction)
    assert config.use_precision_aware_optimizer is True
    assert (config.exp_avg_dtype, config.exp_avg_sq_dtype) == (torch.bfloat16, torch.uint8)
    assert (config.main_params_dtype, config.main_grads_dtype) == (torch.float16, torch.float32)


def test_plain_state_needs_nothing() -> None:
    config = optimizer_config(Optimizer(), megatron(None), DistributedDataParallelConfig())
    assert (config.use_precision_aware_optimizer, config.exp_avg_dtype) == (False, torch.float32)


# Refusals


FP8 = Precision("bfloat16", Fp8())


def on_gpu(tmp_path: Path, precision: Precision = FP8, *overrides: str) -> RunConfig:
    return replace(configure(tmp_path, *overrides), device="cuda", memory=SHARED, precision=precision)


def test_what_fits_passes(tmp_path: Path) -> None:
    check(on_gpu(tmp_path))
    check(on_gpu(tmp_path, Precision("bfloat16", Fp8("mxfp8", parameters=True, first_layers=1))))
    check(on_gpu(tmp_path, Precision("bfloat16"), "optimizer.state.mean=bfloat16"))


@pytest.mark.parametrize(
    ("precision", "overrides", "expected"),
    [
        (Precision("float32", Fp8()), (), "precision.dtype: must be bfloat16 with precision.fp8 (got 'float32')"),
        (
            Precision("bfloat16", Fp8("delayed", last_layers=1)),
            (),
            "precision.fp8.last_layers: the recipe 'delayed' cannot leave layers out (got 1); 0 would do",
        ),
        (
            Precision("bfloat16", Fp8(first_layers=3)),
            (),
            "precision.fp8.first_layers: must not exceed the 2 layers of a pipeline process (got 3)",
        ),
        (
            FP8,
            ("model.ffn=200",),
            "precision.fp8: the recipe 'tensorwise' needs widths that are multiples of 16, but the MLP is 200 on each "
            "process; null would do",
        ),
        (
            FP8,
            ("batch.micro_batch_tokens=100",),
            "batch.micro_batch_tokens: must be divisible by 16, as parallel.context and parallel.sequence cut "
            "micro-batches, in parts that FP8 takes (got 100); 96 or 112 would do",
        ),
        (
            Precision("float32"),
            ("optimizer.state.square=fp8",),
            "optimizer.state: anything but float32 needs precision.dtype: bfloat16 (got 'float32')",
        ),
    ],
)
def test_what_does_not_go_together(
    tmp_path: Path, precision: Precision, overrides: tuple[str, ...], expected: str
) -> None:
    assert problems(on_gpu(tmp_path, precision, *overrides)) == [expected]


def test_a_cpu_has_neither(tmp_path: Path) -> None:
    config = replace(configure(tmp_path, "optimizer.state.mean=fp8"), precision=FP8)
    assert problems(config) == [
        "precision.fp8: needs Transformer Engine on a GPU (got device: cpu); null would do",
        "optimizer.state: anything but float32 needs Transformer Engine on a GPU (got device: cpu)",
        "optimizer.state: anything but float32 needs memory.distributed_optimizer: true",
    ]
    with pytest.raises(ConfigError, match=r"precision.fp8: needs Transformer Engine on a GPU \(got device: cpu\)"):
        check_device(FP8, CPU, transformer_engine=True)
    check_device(Precision("bfloat16"), CPU, transformer_engine=False)


class Taking:
    """Transformer Engine's recipe as it was."""

    def __init__(self, margin: int, override_linear_precision: tuple[bool, ...]) -> None:
        pass


class NotTaking:
    def __init__(self, margin: int) -> None:
        pass


def test_delayed_scaling_needs_what_megatron_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(fp8_utils, "TEDelayedScaling", type("Ours", (NotTaking,), {}), raising=False)
    device = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="delayed does not work with this Transformer Engine, .* tensorwise would do"):
        check_device(Precision("bfloat16", Fp8("delayed")), device, transformer_engine=True)
    check_device(FP8, device, transformer_engine=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_must_have_the_recipe(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    device, precision = torch.device("cuda", 0), Precision("bfloat16", Fp8(recipe))
    found = CAPABILITY[recipe]
    monkeypatch.setattr(fp8_utils, "TEDelayedScaling", type("Ours", (Taking,), {}), raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: found)
    check_device(precision, device, transformer_engine=True)
    with pytest.raises(ConfigError, match="precision.fp8: needs Transformer Engine, which is not installed"):
        check_device(precision, device, transformer_engine=False)
    found = (found[0] - 1, 9) if found[1] == 0 else (found[0], found[1] - 1)
    with pytest.raises(ConfigError, match=rf"recipe: {recipe} needs a GPU of compute .*this one, A card, has"):
        check_device(precision, device, transformer_engine=True)
    found = (7, 5)
    with pytest.raises(ConfigError, match=r"precision.dtype: bfloat16 needs a GPU of compute capability 8.0, but"):
        check_device(Precision("bfloat16"), device, transformer_engine=True)
    check_device(Precision("float32"), device, transformer_engine=False)
