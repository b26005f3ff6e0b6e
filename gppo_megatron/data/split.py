"""What a data source gives a run, and which of its problems are kept for evaluation."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from gppo_megatron.errors import DataError
from gppo_megatron.types import Prompt


@dataclass(frozen=True)
class Problems:
    """Distinct problems in the order they were drawn. No text of `heldout` is in `train`.

    drawn = duplicates + len(train) + len(heldout).
    stop_ids: tokens that end a response to these prompts, besides the model's own end tokens.
    """

    train: tuple[Prompt, ...]
    heldout: tuple[Prompt, ...]
    drawn: int
    duplicates: int
    stop_ids: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return (
            f"{self.drawn} problems drawn, {self.duplicates} of them duplicates: "
            f"{len(self.train)} to train on, {len(self.heldout)} held out"
        )


def is_held_out(text: str, share: float) -> bool:
    """Whether a problem is kept for evaluation: a matter of its text alone, so seed, order and pool cannot move it."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return place < share * 2**64


def check_room(problems: Problems, new_tokens: int, rooms: Mapping[str, int]) -> None:
    """Raises DataError naming each of `rooms` (name -> tokens) that the longest prompt and `new_tokens` overflow."""
    longest = max((len(prompt.token_ids) for prompt in (*problems.train, *problems.heldout)), default=0)
    narrow = [f"{name} = {tokens}" for name, tokens in rooms.items() if longest + new_tokens > tokens]
    if narrow:
        raise DataError(
            f"the longest prompt has {longest} tokens; with rollout.max_new_tokens = {new_tokens} that is "
            f"{longest + new_tokens} in all, more than {' and '.join(narrow)}"
        )
