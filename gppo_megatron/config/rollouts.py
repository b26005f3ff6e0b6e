"""The sections of `rollout:`, a kind each."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gppo_megatron.config.started import Start, StartEmbedded, StartSglang, StartVllm


class Room(NamedTuple):
    """A key that bounds how many tokens a prompt and its response may have together, and its value."""

    key: str
    tokens: int


@dataclass(frozen=True)
class EmbeddedRollout:
    """Sampling inside the trainer's own processes.

    cache_tokens: most tokens (rows x length) the key-value cache of one sampling batch holds.
    """

    max_new_tokens: int
    kind: Literal["embedded"] = "embedded"
    temperature: float = 1.0
    cache_tokens: int = 65_536

    @property
    def room(self) -> Room:
        return Room("rollout.cache_tokens", self.cache_tokens)


@dataclass(frozen=True)
class ServerRollout:
    """What all kinds of rollout servers have in common.

    urls: of servers that are running, on this machine or others. router: or of an SGLang router, whose workers they
        are. start: or those that the launcher starts.
    context: most tokens of a prompt and its response that they take.
    requests: sent to one server at a time, at most. stall_seconds: without news, after which a server counts as lost.
    recovery_seconds: how long a run waits for its servers at its start, and for one when none is left.
    probe_tolerance: largest mean difference (nats) of a few tokens' log-probs from the policy's, after new weights, of
        a server that cannot tell the checksums of them all; null: 1e-4 in float32, 0.1 in bfloat16.
    """

    max_new_tokens: int
    context: int
    urls: tuple[str, ...] | None = None
    router: str | None = None
    start: Start | None = None
    temperature: float = 1.0
    requests: int = 256
    stall_seconds: float = 120.0
    recovery_seconds: float = 300.0
    probe_tolerance: float | None = None

    @property
    def room(self) -> Room:
        return Room("rollout.context", self.context)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all servers, but for those that a router lists."""
        return self.urls or () if self.start is None else self.start.urls


@dataclass(frozen=True)
class SglangRollout(ServerRollout):
    """Sampling by SGLang servers.

    sync: how weights reach them: by broadcast (`distributed`: NCCL from GPUs, gloo from CPUs), in the body of requests
        (`tensor`), or through `<run>/weights`, a folder that they see under the same path (`disk`).
    address: of this run's first process, as the servers reach it; used by `distributed`.
    """

    kind: Literal["sglang"] = "sglang"
    start: StartSglang | StartEmbedded | None = None
    sync: Literal["distributed", "tensor", "disk"] = "distributed"
    address: str = "127.0.0.1"


@dataclass(frozen=True)
class VllmRollout(ServerRollout):
    """Sampling by vLLM servers, which take weights through a folder alone: `sync` may be nothing else."""

    kind: Literal["vllm"] = "vllm"
    start: StartVllm | None = None
    sync: Literal["distributed", "tensor", "disk"] = "disk"


CUTTING = ("top_p", "top_k", "min_p")
"""Sampling keys that no run has."""

NO_CUT = (
    "sampling from a part of the distribution is not for training: the log-probs that come back would not be those of "
    "what was sampled; remove it, and use rollout.temperature"
)

NEED_NO_KIND = (EmbeddedRollout,)
"""What a section is whose `kind` is not written."""
