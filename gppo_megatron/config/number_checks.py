"""Which `precision:` and `optimizer.state:` work with a model, a layout and a device. No torch."""

from collections.abc import Iterator

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.numbers import WIDTHS, Fp8, OptimizerState
from gppo_megatron.config.schema import RunConfig


def number_problems(config: RunConfig, shape: Architecture) -> Iterator[str]:
    """A line for each rule broken, with its key."""
    yield from _fp8_problems(config, shape)
    yield from _state_problems(config, "optimizer.state", config.optimizer.state)
    if config.warmup is not None:
        yield from _state_problems(config, "warmup.optimizer.state", config.warmup.optimizer.state)


def _fp8_problems(config: RunConfig, shape: Architecture) -> Iterator[str]:
    fp8 = config.precision.fp8
    if fp8 is None:
        return
    if config.device == "cpu":
        yield "precision.fp8: needs Transformer Engine on a GPU (got device: cpu); null would do"
    if config.precision.dtype != "bfloat16":
        yield f"precision.dtype: must be bfloat16 with precision.fp8 (got {config.precision.dtype!r})"
    if fp8.parameters and not config.memory.distributed_optimizer:
        yield "precision.fp8.parameters: needs memory.distributed_optimizer: true, which keeps the weights steps add to"
    yield from _spared_problems(fp8, max(1, shape.layers // config.parallel.pipeline))
    unit = WIDTHS[fp8.recipe]
    for name, width in _widths(config, shape):
        if width % unit:
            yield (
                f"precision.fp8: the recipe {fp8.recipe!r} needs widths that are multiples of {unit}, but {name} is "
                f"{width} on each process; null would do"
            )


def _spared_problems(fp8: Fp8, stage: int) -> Iterator[str]:
    """Of the layers left out of FP8; stage: layers of a pipeline process."""
    spared = {"first_layers": fp8.first_layers, "last_layers": fp8.last_layers}
    for key, count in spared.items():
        if count and fp8.recipe == "delayed":
            yield f"precision.fp8.{key}: the recipe 'delayed' cannot leave layers out (got {count}); 0 would do"
        elif count > stage:
            yield f"precision.fp8.{key}: must not exceed the {stage} layers of a pipeline process (got {count})"


def _widths(config: RunConfig, shape: Architecture) -> Iterator[tuple[str, int]]:
    """Of the layers' matrices, as one process has them."""
    tensor = config.parallel.tensor
    groups = max(1, shape.kv_heads // tensor)
    yield "the hidden size", shape.hidden
    yield "the width of the heads", shape.heads // tensor * shape.head_dim
    yield "queries, keys and values together", (shape.heads // tensor + 2 * groups) * shape.head_dim
    if shape.experts is None or shape.experts.dense:
        yield "the MLP", shape.ffn // tensor
    if shape.experts is not None:
        yield "an expert", shape.experts.ffn // config.parallel.expert_tensor


def _state_problems(config: RunConfig, key: str, state: OptimizerState) -> Iterator[str]:
    if state.plain:
        return
    if config.device == "cpu":
        yield f"{key}: anything but float32 needs Transformer Engine on a GPU (got device: cpu)"
    if not config.memory.distributed_optimizer:
        yield f"{key}: anything but float32 needs memory.distributed_optimizer: true"
    if config.precision.dtype != "bfloat16":
        yield f"{key}: anything but float32 needs precision.dtype: bfloat16 (got {config.precision.dtype!r})"
