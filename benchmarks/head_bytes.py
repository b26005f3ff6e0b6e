"""Peak live bytes of the fused head at sizes that fit no test machine, counted on tensors without storage.

`python benchmarks/head_bytes.py` prints a table. Counted is every tensor that the head makes, forward and backward,
at the end of each operation; not counted are its inputs, the gradients given to it, that of the hidden rows, and
`main_grad`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gppo_megatron.policy.megatron.head import VocabShard, token_statistics

GIB = 2**30


class LiveBytes(TorchDispatchMode):
    """The most bytes that storages made under it took at the end of any operation: `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()
        self.peak = 0

    def leave_out(self, *tensors: torch.Tensor) -> None:
        """Not to be counted: tensors that were there before."""
        self._before |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._before:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


@dataclass(frozen=True)
class Sizes:
    """rows: T. vocab is cut over `shards` ranks."""

    rows: int
    hidden: int = 4096
    vocab: int = 151_936
    shards: int = 1
    dtype: torch.dtype = torch.bfloat16


@contextmanager
def pretended_group(shards: int) -> Iterator[dist.ProcessGroup]:
    """A group of that many ranks in which collectives leave everything as it is."""
    dist.init_process_group("fake", rank=0, world_size=shards, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def peak_bytes(sizes: Sizes) -> int:
    """Of log-prob, entropy and sum p^2 with all gradients, the weight's in a float32 `main_grad`.

    The statistics are held to the end.
    """
    with pretended_group(sizes.shards) as group, FakeTensorMode():
        hidden_NH = torch.empty(sizes.rows, sizes.hidden, dtype=sizes.dtype, requires_grad=True)
        weight_VH = torch.nn.Parameter(torch.empty(sizes.vocab // sizes.shards, sizes.hidden, dtype=sizes.dtype))
        weight_VH.main_grad = torch.empty(weight_VH.shape)  # type: ignore[attr-defined]
        labels_N = torch.empty(sizes.rows, dtype=torch.int64)
        given = [torch.empty(sizes.rows) for _ in range(3)]
        with LiveBytes() as live:
            live.leave_out(hidden_NH, weight_VH, weight_VH.main_grad, labels_N, *given)  # type: ignore[attr-defined]
            ours = token_statistics(hidden_NH, weight_VH, labels_N, VocabShard(0, sizes.vocab, group), 1.0)
            torch.autograd.backward((ours.logprobs_N, ours.entropy_N, ours.squares_N), given)
        assert hidden_NH.grad is not None
        return live.peak - hidden_NH.grad.untyped_storage().nbytes()


def growth(sizes: Sizes) -> float:
    """Bytes that one more row adds."""
    more = Sizes(2 * sizes.rows, sizes.hidden, sizes.vocab, sizes.shards, sizes.dtype)
    return (peak_bytes(more) - peak_bytes(sizes)) / sizes.rows


def main() -> None:
    print(f"{'T':>6} {'H':>6} {'V':>7} {'TP':>3} {'peak GiB':>9} {'bytes a token':>14}")
    for shards in (1, 8):
        sizes = Sizes(8192, shards=shards)
        gib, slope = peak_bytes(sizes) / GIB, growth(sizes)
        print(f"{sizes.rows:6} {sizes.hidden:6} {sizes.vocab:7} {shards:3} {gib:9.3f} {slope:14.1f}")


if __name__ == "__main__":
    main()
