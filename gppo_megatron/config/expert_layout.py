"""Which layouts of a model's experts work. No torch."""

from collections.abc import Iterator

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.schema import Parallel


def expert_problems(parallel: Parallel, shape: Architecture) -> Iterator[str]:
    """A line for each rule broken, with its key."""
    experts, processes = shape.experts, parallel.tensor * parallel.data * parallel.context
    if experts is None:
        for key in ("expert", "expert_tensor"):
            if getattr(parallel, key) > 1:
                yield f"parallel.{key}: the model has no experts (got {getattr(parallel, key)}); 1 would do"
        return
    if parallel.tensor > 1 and not parallel.sequence:
        yield "parallel.sequence: a model with experts needs it where parallel.tensor exceeds 1; true would do"
    if parallel.expert == 1 and parallel.expert_tensor != parallel.tensor:
        # Megatron-Core then takes experts for dense parameters and adds their gradients up over the wrong processes.
        yield (
            f"parallel.expert_tensor: must equal parallel.tensor = {parallel.tensor} where parallel.expert is 1 "
            f"(got {parallel.expert_tensor}); {parallel.tensor} would do, or parallel.expert > 1"
        )
    if experts.count % parallel.expert:
        yield (
            f"parallel.expert: must divide the model's {experts.count} experts (got {parallel.expert}); "
            f"{divisors(experts.count)} would do"
        )
    if experts.ffn % parallel.expert_tensor:
        yield (
            f"parallel.expert_tensor: must divide the experts' ffn = {experts.ffn} (got {parallel.expert_tensor}); "
            f"{divisors(experts.ffn)} would do"
        )
    if processes % (parallel.expert * parallel.expert_tensor):
        yield (
            f"parallel.expert: times parallel.expert_tensor must divide parallel.tensor x data x context = {processes} "
            f"(got {parallel.expert} x {parallel.expert_tensor}); products of {divisors(processes)} would do"
        )


def divisors(number: int) -> str:
    """In words."""
    *rest, last = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return f"{', '.join(rest)} or {last}" if rest else last
