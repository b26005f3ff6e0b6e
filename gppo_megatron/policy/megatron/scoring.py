"""What the policy can measure of a batch before the first update moves it: one forward pass, any of these."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from gppo_megatron.errors import GppoError
from gppo_megatron.policy.megatron.divergence import HeadRows, pick, top_tokens
from gppo_megatron.policy.megatron.head import TokenStatistics
from gppo_megatron.types import MicroBatch, PastRows, TopStreams


@dataclass(frozen=True)
class Scored:
    """What a measurement sees: the rows of this process with their statistics, and the log-probs of all N labels.

    The two are the same rows but under context parallelism. version: of the policy that scores.
    """

    rows: HeadRows
    statistics: TokenStatistics
    logprobs_N: torch.Tensor
    version: int


class Measurement(Protocol):
    """Measured on the last pipeline stage, on the rows of a micro-batch that carry loss."""

    def check(self, batch: MicroBatch, version: int) -> None:
        """On every process, before the forward pass. Raises GppoError where `batch` cannot be measured by `version`."""
        ...

    def measure(self, scored: Scored) -> Any:
        """Collective over the tensor-parallel group, without gradient."""
        ...

    def attach(self, batch: MicroBatch, measured: Any) -> MicroBatch:
        """The micro-batch with it. Called where the mask is not empty."""
        ...


@dataclass(frozen=True)
class AnchorLogprobs:
    """The policy's own log-probs as the anchor's."""

    def check(self, batch: MicroBatch, version: int) -> None:
        """Any batch will do."""

    def measure(self, scored: Scored) -> torch.Tensor:
        return scored.logprobs_N.cpu()

    def attach(self, batch: MicroBatch, measured: torch.Tensor) -> MicroBatch:
        return batch.with_anchor(_at_mask(batch, measured))


@dataclass(frozen=True)
class ReferenceLogprobs(AnchorLogprobs):
    """The policy's own log-probs as the reference's."""

    def attach(self, batch: MicroBatch, measured: torch.Tensor) -> MicroBatch:
        return batch.with_reference(_at_mask(batch, measured))


@dataclass(frozen=True)
class OwnTopTokens:
    """The policy's own `count` likeliest tokens, as a sampler would have reported them."""

    count: int

    def check(self, batch: MicroBatch, version: int) -> None:
        """Any batch will do."""

    def measure(self, scored: Scored) -> tuple[torch.Tensor, ...]:
        """Where the rows stand, their ids, log-probs and rest."""
        distribution = scored.rows.distribution(scored.statistics)
        ids_NK = top_tokens(distribution, self.count)
        picked = pick(distribution, ids_NK, scored.rows.labels_N)
        return scored.rows.picked_N, ids_NK.to("cpu", torch.int32), picked.logprobs_NK.cpu(), picked.rest_N.cpu()

    def attach(self, batch: MicroBatch, measured: tuple[torch.Tensor, ...]) -> MicroBatch:
        picked_N, *streams = measured
        return replace(batch, top=TopStreams(*(_at(picked_N, batch, values_N) for values_N in streams)))


@dataclass(eq=False)
class OwnRows:
    """The policy's rows before the head, and one copy of its head for all micro-batches of a version.

    sampled_here: whether the batch must have been sampled by this very version, the anchor being the sampler.
    count: how many rows of each micro-batch (and context-parallel process), drawn at random; None: all.
    """

    sampled_here: bool
    count: int | None = None
    _version: int | None = field(default=None, init=False)
    _weight_VH: torch.Tensor = field(default_factory=lambda: torch.empty(0), init=False)

    def check(self, batch: MicroBatch, version: int) -> None:
        versions = sorted(set(batch.policy_versions_T[batch.mask_T].tolist()))
        if self.sampled_here and versions not in ([], [version]):
            raise GppoError(
                f"the exact divergence to the sampler needs tokens sampled by the policy's version {version}, but "
                f"versions {versions} sampled these; set objective.anchor: recomputed"
                + ("" if self.count is None else ", or diagnostics.exact_sample: 0")
            )

    def measure(self, scored: Scored) -> PastRows:
        if self._version != scored.version:
            self._version, self._weight_VH = scored.version, scored.rows.weight_VH.detach().clone()
        some = self._some(len(scored.rows.picked_N), scored.version)
        distribution = scored.rows.distribution(scored.statistics).at(some)
        return PastRows(
            scored.rows.picked_N[some],
            distribution.hidden_NH.cpu(),
            self._weight_VH,
            distribution.top_logits_N.cpu(),
            distribution.top_logprobs_N.cpu(),
        )

    def _some(self, rows: int, version: int) -> slice | torch.Tensor:
        """Which of so many rows, in their order; the same on all processes that have these rows."""
        if self.count is None:
            return slice(None)
        return torch.randperm(rows, generator=torch.Generator().manual_seed(version))[: self.count].sort().values

    def attach(self, batch: MicroBatch, measured: PastRows) -> MicroBatch:
        return replace(batch, past=measured)


def measured_of_anchor(anchor: str, estimator: str, topk: int, exact_sample: int = 0) -> tuple[Measurement, ...]:
    """What the policy must measure of every batch before the first update, for this anchor and estimator.

    exact_sample: rows of each micro-batch whose exact divergence is worked out beside another estimator; 0: none.
    """
    recomputed = anchor == "recomputed"
    measurements: list[Measurement] = [AnchorLogprobs()] if recomputed else []
    if recomputed and estimator == "topk":
        measurements.append(OwnTopTokens(topk))
    if estimator == "exact" or exact_sample:
        count = None if estimator == "exact" else exact_sample
        measurements.append(OwnRows(sampled_here=not recomputed, count=count))
    return tuple(measurements)


def _at_mask(batch: MicroBatch, values_N: torch.Tensor) -> torch.Tensor:
    return _at(batch.mask_T.nonzero().squeeze(1), batch, values_N)


def _at(picked_N: torch.Tensor, batch: MicroBatch, values_N: torch.Tensor) -> torch.Tensor:
    """[T, ...]: the values at these N of the batch's T tokens, 0 elsewhere."""
    values_T = values_N.new_zeros((len(batch.tokens_T), *values_N.shape[1:]))
    values_T[picked_N] = values_N
    return values_T
