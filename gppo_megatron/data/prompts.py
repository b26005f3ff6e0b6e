"""An endless stream of prompts in an order that depends on the seed alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gppo_megatron.types import Prompt


@dataclass(frozen=True)
class StreamState:
    """Where a stream stands: `offset` prompts of pass `epoch` (both from 0) have been taken."""

    epoch: int
    offset: int


class PromptStream:
    """Every prompt once an epoch, each epoch in an order of its own, given by (seed, epoch).

    However the prompts are taken, one at a time or many, their order is the same. seed: 0 to 2**64 - 1.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self.restore(StreamState(0, 0))

    def state(self) -> StreamState:
        """What `restore` needs to go on from here."""
        return self._state

    def restore(self, state: StreamState) -> None:
        """Go on from `state`. Raises ValueError for one that a stream of this length cannot have."""
        if state.epoch < 0 or not 0 <= state.offset < len(self._prompts):
            raise ValueError(f"{state} is no state of a stream of {len(self._prompts)} prompts")
        self._state = state
        self._order = self._order_of(state.epoch)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; they may span epochs."""
        taken: list[Prompt] = []
        while len(taken) < count:
            epoch, offset = self._state.epoch, self._state.offset
            places = self._order[offset : offset + count - len(taken)]
            taken += [self._prompts[place] for place in places]
            end = offset + len(places)
            if end < len(self._prompts):
                self._state = StreamState(epoch, end)
            else:
                self.restore(StreamState(epoch + 1, 0))
        return taken

    def _order_of(self, epoch: int) -> NDArray[np.intp]:
        """A permutation from raw random bits: numpy promises those for ever, but not its own shuffle."""
        generator = np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64))
        return np.argsort(generator.random_raw(len(self._prompts)), kind="stable")
