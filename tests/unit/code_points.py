"""A tokenizer that the data tests can read back: a token is a character's code point, and 0 ends a response."""

from collections.abc import Sequence

from gppo_megatron.errors import DataError


class CodePoints:
    """It cannot write a snowman. A chat is `system|text>`."""

    end_id = 0

    def encode(self, text: str) -> list[int]:
        if "\u2603" in text:
            raise DataError(f"no token for {text!r}")
        return [ord(character) for character in text]

    def encode_chat(self, text: str, system: str = "", reply: str = "") -> list[int]:
        return self.encode(f"{system}|{text}>{reply}")


def written(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))
