"""Which layouts of the processes fit a model: a table of rules, each with the choices that would do. No torch."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.numbers import WIDTHS, Fp8
from gppo_megatron.config.schema import Parallel, RunConfig

Needs = Callable[[RunConfig, Architecture], bool]
Says = Callable[[RunConfig, Architecture], str]


@dataclass(frozen=True)
class Rule:
    """`key` breaks the rule where `broken` holds; `says` names the rule, the value and what would do."""

    key: str
    broken: Needs
    says: Says


def _tensor_sizes(shape: Architecture) -> list[int]:
    """Where there are fewer key-value heads than processes, as many processes share each of them."""
    common = math.gcd(shape.heads, shape.ffn)
    sizes = [size for size in range(1, common + 1) if common % size == 0]
    return [size for size in sizes if shape.kv_heads % size == 0 or size % shape.kv_heads == 0]


def slices(parallel: Parallel) -> int:
    """Each sequence's length is padded to a multiple of this: a context-parallel process takes two slices of each."""
    return 2 * parallel.context if parallel.context > 1 else 1


def alignment(parallel: Parallel, fp8: Fp8 | None = None) -> int:
    """A micro-batch's length is a multiple of this: sequence-parallel processes take equal parts of what is left, which
    must be as wide as an FP8 product takes."""
    tokens = WIDTHS[fp8.recipe] if fp8 is not None else 1
    return slices(parallel) * (parallel.tensor if parallel.sequence else 1) * tokens


def _unit(config: RunConfig) -> int:
    return alignment(config.parallel, config.precision.fp8)


def micro_batch_multiple(parallel: Parallel) -> int:
    """The micro-batches of an optimizer step are a multiple of this: an interleaved pipeline takes them in rounds."""
    return parallel.pipeline if parallel.virtual_stages > 1 else 1


def _layers_of_a_part(config: RunConfig, shape: Architecture) -> int:
    return max(1, shape.layers // config.parallel.pipeline // config.parallel.virtual_stages)


RULES = (
    Rule(
        "parallel.tensor",
        lambda config, shape: config.parallel.tensor not in _tensor_sizes(shape),
        lambda config, shape: (
            f"must divide the model's heads = {shape.heads} and ffn = {shape.ffn}, and divide its kv_heads = "
            f"{shape.kv_heads} or be a multiple of them (got {config.parallel.tensor}); "
            f"{_either(_tensor_sizes(shape))} would do"
        ),
    ),
    Rule(
        "parallel.pipeline",
        lambda config, shape: shape.layers % config.parallel.pipeline > 0,
        lambda config, shape: (
            f"must divide the model's layers = {shape.layers} (got {config.parallel.pipeline}); "
            f"{_divisors(shape.layers)} would do"
        ),
    ),
    Rule(
        "parallel.virtual_stages",
        lambda config, shape: config.parallel.virtual_stages > 1 and config.parallel.pipeline == 1,
        lambda config, shape: (
            f"needs parallel.pipeline > 1, there is no pipeline to interleave (got {config.parallel.virtual_stages}); "
            "1 would do"
        ),
    ),
    Rule(
        "parallel.virtual_stages",
        lambda config, shape: (
            shape.layers % config.parallel.pipeline == 0
            and shape.layers // config.parallel.pipeline % config.parallel.virtual_stages > 0
        ),
        lambda config, shape: (
            f"must divide the {shape.layers // config.parallel.pipeline} layers of a pipeline process, the model's "
            f"{shape.layers} over parallel.pipeline = {config.parallel.pipeline} (got "
            f"{config.parallel.virtual_stages}); {_divisors(shape.layers // config.parallel.pipeline)} would do"
        ),
    ),
    Rule(
        "parallel.virtual_stages",
        lambda config, shape: config.parallel.virtual_stages > 1 and config.batch.arrangement == "padded",
        lambda config, shape: "needs micro-batches of one shape, batch.arrangement: packed; 1 would do",
    ),
    Rule(
        "parallel.sequence",
        lambda config, shape: config.parallel.sequence and config.parallel.tensor == 1,
        lambda config, shape: "needs parallel.tensor > 1, whose processes share the sequence; false would do",
    ),
    Rule(
        "parallel.overlap_parameters",
        lambda config, shape: config.parallel.overlap_parameters and not config.memory.distributed_optimizer,
        lambda config, shape: "needs memory.distributed_optimizer: true, without it no parameter is gathered",
    ),
    Rule(
        "parallel.overlap_parameters",
        lambda config, shape: config.parallel.overlap_parameters and not config.parallel.overlap_gradients,
        lambda config, shape: "needs parallel.overlap_gradients: true, Megatron-Core overlaps both or gradients alone",
    ),
    Rule(
        "memory.recompute_layers",
        lambda config, shape: config.memory.recompute_layers > _layers_of_a_part(config, shape),
        lambda config, shape: (
            f"must not exceed the layers of one part of the model, {_layers_of_a_part(config, shape)} "
            f"(got {config.memory.recompute_layers}); {_divisors(_layers_of_a_part(config, shape))} would do"
        ),
    ),
    Rule(
        "batch.micro_batch_tokens",
        lambda config, shape: config.batch.micro_batch_tokens % _unit(config) > 0,
        lambda config, shape: (
            f"must be divisible by {_unit(config)}, as parallel.context and parallel.sequence cut micro-batches"
            f"{', in parts that FP8 takes' if config.precision.fp8 else ''} (got {config.batch.micro_batch_tokens}); "
            f"{_multiples(config.batch.micro_batch_tokens, _unit(config))} would do"
        ),
    ),
)


def layout_problems(config: RunConfig, shape: Architecture) -> Iterator[str]:
    """A line for every rule that the run's layout breaks."""
    for rule in RULES:
        if rule.broken(config, shape):
            yield f"{rule.key}: {rule.says(config, shape)}"


def _multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _divisors(number: int) -> str:
    return _either([divisor for divisor in range(1, number + 1) if number % divisor == 0])


def _either(numbers: list[int]) -> str:
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last}" if rest else last
