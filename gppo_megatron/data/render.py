"""How problems become tokens."""

from typing import Protocol


class Tokenizer(Protocol):
    """What data needs of a tokenizer; neither method adds tokens of its own accord."""

    @property
    def end_id(self) -> int:
        """The token that ends a reference answer."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`. Raises DataError naming the characters that the vocabulary cannot express."""
        ...

    def encode_chat(self, text: str, system: str = "", reply: str = "") -> list[int]:
        """A conversation in which a user wrote `text`, after the instructions `system` where there are any, and in
        which the model's answer begins with `reply`. Raises DataError.
        """
        ...


def prompt_ids(text: str, chat: bool, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a prompt: `text` alone, or with `chat` as a user's turn in the tokenizer's own template."""
    return tuple(tokenizer.encode_chat(text) if chat else tokenizer.encode(text))


def answer_ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a response that is `text` alone, end token included."""
    return (*tokenizer.encode(text), tokenizer.end_id)
