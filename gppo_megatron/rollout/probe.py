"""A few responses of each server, scored by the policy: whether it samples from the policy's weights."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gppo_verifiers.types import Status, Verdict

from gppo_megatron.data.packing import Packer
from gppo_megatron.rollout.engine import Request
from gppo_megatron.rollout.event_loop import EventLoop
from gppo_megatron.rollout.server import RefusedError, Sampled, Server, ServerError
from gppo_megatron.types import Group, Prompt, Team, TrainBatch, Trajectory

Gap = Callable[[Request, Sampled], float]
"""Collective: mean absolute difference, in nats, of sampled tokens' log-probs from the policy's own.

0 on a process that does not know the policy's.
"""


@dataclass(frozen=True)
class PolicyGap:
    """The `Gap` to a policy. packer: cuts one batch. annotate: collective, the policy's log-probs as the anchor's.

    prompt: what tokens are sampled after.
    """

    packer: Packer
    annotate: Callable[[TrainBatch], TrainBatch]
    prompt: Prompt

    def __call__(self, request: Request, sampled: Sampled) -> float:
        group = Group(self.prompt, (_trajectory(request, sampled),))
        (batch,) = self.packer.pack([group], [[0.0]])
        differences = [
            (each.anchor_logprobs_T - each.sampler_logprobs_T)[each.mask_T].abs()
            for each in self.annotate(batch).micro_batches
        ]
        return float(torch.cat(differences).mean())


def _trajectory(request: Request, sampled: Sampled) -> Trajectory:
    before, count = len(request.prompt_ids), len(sampled.token_ids)
    return Trajectory(
        token_ids=np.array([*request.prompt_ids, *sampled.token_ids], dtype=np.int64),
        sampler_logprobs=np.array([0.0] * before + sampled.logprobs, dtype=np.float32),
        trainable=np.arange(before + count) >= before,
        policy_versions=np.full(before + count, -1, dtype=np.int64),
        finish="length",
        verdict=Verdict(0.0, Status.GRADED),
        experts=sampled.experts,
    )


@dataclass(frozen=True)
class Probe:
    """request: what each server is asked. tolerance: of the gap, at most."""

    servers: Sequence[Server]
    loop: EventLoop
    world: Team
    request: Request
    gap: Gap
    tolerance: float

    def __call__(self, urls: Sequence[str]) -> str:
        """Collective: which of the servers does not sample as the policy does; empty where all do."""
        asked = [self._sampled(url) for url in urls] if self.world.rank == 0 else []
        for url, sampled in zip(urls, self.world.gather(asked)[0], strict=True):
            if isinstance(sampled, str):
                return sampled
            if sampled is None or not sampled.token_ids:
                continue  # its next request shows what is wrong, and the fleet leaves it out
            # One verdict for all: only some of the processes know the policy's log-probs.
            gap = max(self.world.gather(self.gap(self.request, sampled)))
            if not gap <= self.tolerance:
                return (
                    f"{url} does not sample as the policy does: the log-probs of {len(sampled.token_ids)} tokens "
                    f"differ by {gap:.2g} on average, more than rollout.probe_tolerance = {self.tolerance:g}"
                )
        return ""

    def _sampled(self, url: str) -> Sampled | str | None:
        """A response of the server; why it refuses; None where it does not answer."""
        (server,) = [server for server in self.servers if server.url == url]
        try:
            return self.loop.run(server.generate(self.request, f"probe-{uuid.uuid4().hex[:12]}", lambda _: None))
        except RefusedError as error:
            return str(error)
        except ServerError:
            return None
