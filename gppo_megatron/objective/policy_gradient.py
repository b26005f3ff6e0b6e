"""Per-token losses. `TokenStreams` in, `TokenLoss` out; nothing here sums over tokens (see `reduce`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from gppo_megatron.metrics import Metric


@dataclass(frozen=True, eq=False)
class TokenStreams:
    """What an objective may look at, one entry a predicted token; float32 unless said otherwise.

    logprobs_T: log pi of the token under the current policy, with gradient.
    entropy_T: the current policy's entropy (nats), with gradient.
    anchor_logprobs_T: log mu of the token under the trust region's centre.
    sampler_logprobs_T: its log-probability when it was sampled (equal to the anchor by default).
    advantages_T: the token's advantage.
    mask_T: bool, tokens that carry loss; whatever the other streams hold elsewhere (NaN included) must not matter.
    """

    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor
    anchor_logprobs_T: torch.Tensor
    sampler_logprobs_T: torch.Tensor
    advantages_T: torch.Tensor
    mask_T: torch.Tensor


@dataclass(frozen=True, eq=False)
class TokenLoss:
    """loss_T: float32 [T], exactly 0 (and with zero gradient) outside the mask. metrics: 0-dimensional tensors."""

    loss_T: torch.Tensor
    metrics: Mapping[str, Metric[torch.Tensor]]


class Objective(Protocol):
    """A loss per token."""

    def __call__(self, streams: TokenStreams) -> TokenLoss: ...
