"""Checksums of a model's weights as rollout servers hold them: projections that read the same input fused into one.

SGLang's `checksum` names a fused tensor after its parts and hashes the bytes of one rank's parameter: the first 8 bytes
of SHA-256, in hex, for tensors in main memory. A row a token is followed by rows of zeros up to a multiple of 64.
"""

import hashlib
from collections.abc import Iterable

import torch

FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""A Hugging Face part of a name -> the fused part, and this one's place in it."""

PADDED = ("model.embed_tokens.weight", "lm_head.weight")
ROWS_MULTIPLE = 64

PARTS = {"qkv_proj": 3, "gate_up_proj": 2}


def fused_name(name: str) -> tuple[str, int, int]:
    """A parameter's fused name, its place there, and how many parameters are fused in it.

    >>> fused_name("model.layers.0.self_attn.k_proj.weight")
    ('model.layers.0.self_attn.qkv_proj.weight', 1, 3)
    >>> fused_name("model.norm.weight")
    ('model.norm.weight', 0, 1)
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part in FUSED:
            fused, own = FUSED[part]
            return ".".join([*parts[:place], fused, *parts[place + 1 :]]), own, PARTS[fused]
    return name, 0, 1


class FusedChecksums:
    """Takes full tensors one by one, in any order of the fused ones; the parts of one may come in any order too."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[int, bytes]] = {}
        self._done: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one Hugging Face tensor. Raises ValueError for one that came before."""
        fused, place, count = fused_name(name)
        if fused in self._done or place in self._waiting.get(fused, {}):
            raise ValueError(f"{name} came twice")
        parts = self._waiting.setdefault(fused, {})
        data = raw_bytes(tensor)
        padding = -len(tensor) % ROWS_MULTIPLE if name in PADDED else 0
        parts[place] = data + bytes(padding * len(data) // max(1, len(tensor)))
        if len(parts) == count:
            self._done[fused] = checksum(b"".join(parts[each] for each in range(count)))
            del self._waiting[fused]

    def finished(self) -> dict[str, str]:
        """Fused name -> checksum. Raises ValueError where a part is missing."""
        if self._waiting:
            raise ValueError(f"parts are missing of {', '.join(sorted(self._waiting))}")
        return self._done


def fused_checksums(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Fused name -> checksum, of all the weights."""
    checksums = FusedChecksums()
    for name, tensor in weights:
        checksums.add(name, tensor)
    return checksums.finished()


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
