"""The one place that adapts Megatron-Core to a machine without CUDA. Nothing of Megatron's source is edited.

On a CPU, Megatron-Core fails only where it names the CUDA device or asks for its streams. `adapt(device)` answers
those questions for the CPU, once a process, before any Megatron object is built; with CUDA it changes nothing.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import megatron.core.models.common.embeddings.rope_utils as rope_utils
import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch
import torch.distributed as dist
from megatron.core.transformer.mlp import MLP

from gppo_megatron.errors import ConfigError
from gppo_megatron.policy.megatron.elementwise import gated, rotated

CPU = torch.device("cpu")
FACTORIES = (
    "zeros", "ones", "empty", "tensor", "full", "arange", "empty_like", "zeros_like", "ones_like", "full_like",
)  # fmt: skip


class CpuStream:
    """Stands for a CUDA stream or event: on a CPU everything is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def wait(self, _: Any = None) -> None:
        pass

    def record(self, _: Any = None) -> None:
        pass

    def record_event(self, _: Any = None) -> "CpuStream":
        return self

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def device_of(name: str) -> torch.device:
    """The torch device of this process for `device: cpu | cuda`. Raises ConfigError when the machine has none."""
    if name == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise ConfigError("device: cuda, but torch sees no GPU here; set device: cpu, or check the driver")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@functools.cache
def adapt(device: torch.device) -> None:
    """Make Megatron-Core run on `device`; call before building anything of it."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 without Transformer Engine never binds the name it tests
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    if device.type == "cuda":
        return
    _answer_device_questions()
    _replace_streams()
    _replace_tensor_methods()
    _deal_tokens_out()
    rope_utils._apply_rotary_pos_emb_bshd, MLP.forward = rotated, gated


def _answer_device_questions() -> None:
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None
    # Recomputed layers restore the generator's state, although no layer draws a random number.
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    # Torch lists its own factories when a device context is first used. It must not list the replacements: no
    # device context would then reach a factory, and transformers would load models with uninitialised buffers.
    with CPU:
        torch.empty(0)
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory`, with device="cuda" (a literal in Megatron's schedules, masks and optimizers) read as the CPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _replace_streams() -> None:
    stream = CpuStream()
    torch.cuda.Stream = torch.cuda.Event = CpuStream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]


def _replace_tensor_methods() -> None:
    original_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron's optimizers recognise parameters by names such as "torch.cuda.FloatTensor"."""
        name = original_type(self, *args, **kwargs)
        if isinstance(name, str) and name.startswith("torch.") and not name.startswith("torch.cuda."):
            return "torch.cuda." + name.removeprefix("torch.")
        return name

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _deal_tokens_out() -> None:
    """Experts: counts of tokens as Megatron's exchange wants them, and exchanges of unequal parts, which gloo lacks."""
    token_dispatcher.maybe_move_tensor_to_cpu = _counts
    mappings._gather_along_first_dim = _by_size(mappings._gather_along_first_dim, _gather_unequal)
    mappings._reduce_scatter_along_first_dim = _by_size(mappings._reduce_scatter_along_first_dim, _scatter_unequal)


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Of a tensor that is on the CPU already, Megatron would forget the numpy form."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _by_size(equal: Callable[..., torch.Tensor], unequal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's own function but for parts whose sizes are given."""

    def exchange(
        tensor: torch.Tensor, group: Any, sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return equal(tensor, group, sizes, use_global_buffer)
        return unequal(tensor, group, [int(size) for size in sizes])

    return exchange


def _gather_unequal(tensor: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Every rank's rows, one rank after the other."""
    parts = [tensor.new_empty(size, *tensor.shape[1:]) for size in sizes]
    parts[group.rank()] = tensor.contiguous()
    for rank, part in enumerate(parts):
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return torch.cat(parts)


def _scatter_unequal(tensor: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """The sum over ranks of this rank's rows."""
    parts = [part.clone() for part in torch.split(tensor, sizes)]
    for rank, part in enumerate(parts):
        dist.reduce(part, dist.get_global_rank(group, rank), group=group)
    mine: torch.Tensor = parts[group.rank()]
    return mine
