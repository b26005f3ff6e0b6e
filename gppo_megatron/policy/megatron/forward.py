"""One micro-batch through the model: flat sequences in, per-token statistics and the scaled loss out.

Letters: T tokens of the micro-batch, B sequences, S the longest, N predictions with loss, V this rank's vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from gppo_megatron.metrics import Last, Max, Mean, Metric, StepMetrics, Sum
from gppo_megatron.objective.policy_gradient import Objective, TokenStreams
from gppo_megatron.objective.reduce import total
from gppo_megatron.policy.megatron.head import VocabShard, token_statistics
from gppo_megatron.types import MicroBatch


class MegatronLoss(NamedTuple):
    """What Megatron's schedules expect of a loss function; with three members and `calculate_per_token_loss`
    they divide the loss by nothing. num_tokens is unused: the denominators are in the loss."""

    loss: torch.Tensor
    num_tokens: torch.Tensor
    metrics: Mapping[str, Metric[torch.Tensor]]


@dataclass(frozen=True)
class Forward:
    """Runs micro-batches through one model; the log-probs are those at `temperature`, as sampled."""

    shard: VocabShard
    temperature: float
    device: torch.device

    def train(
        self, objective: Objective, version: int, batches: Iterator[MicroBatch], model: Any
    ) -> tuple[torch.Tensor, Any]:
        """A Megatron forward step whose loss is `objective` on weights of `version`; bind those two by `partial`."""
        batch = next(batches)
        return self._logits(batch, model), partial(self._loss, objective, version, batch)

    def score(self, batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
        """A Megatron forward step that collects logprobs_T."""
        batch = next(batches)
        return self._logits(batch, model), partial(self._collect, batch)

    def _logits(self, batch: MicroBatch, model: Any) -> torch.Tensor:
        """[B, S, V] on the last pipeline stage, hidden states elsewhere. Causal attention never sees right padding."""
        tokens_BS = pad_sequence(list(torch.split(batch.tokens_T, list(batch.lengths))), batch_first=True).to(
            self.device
        )
        positions_BS = torch.arange(tokens_BS.shape[1], device=self.device).expand_as(tokens_BS)
        return model(tokens_BS, positions_BS, None)  # type: ignore[no-any-return]

    def _streams(self, batch: MicroBatch, version: int, logits_BSV: torch.Tensor) -> TokenStreams:
        """Statistics of the predictions that carry loss; 0 elsewhere."""
        mask_T = batch.mask_T.to(self.device)
        rows_T = _rows(batch, logits_BSV.shape[1]).to(self.device)
        # A micro-batch without loss still runs one row, so that every rank has a graph to go backward through.
        picked_N = mask_T.nonzero().squeeze(1) if batch.mask_T.any() else rows_T.new_zeros(1)
        logits_NV = logits_BSV.flatten(0, 1)[rows_T[picked_N]]
        labels_N = batch.labels_T.to(self.device)[picked_N]
        statistics = token_statistics(logits_NV, labels_N, self.shard, self.temperature)
        zeros_T = torch.zeros(mask_T.shape, dtype=statistics.logprobs_N.dtype, device=self.device)
        return TokenStreams(
            logprobs_T=zeros_T.index_put((picked_N,), statistics.logprobs_N),
            entropy_T=zeros_T.index_put((picked_N,), statistics.entropy_N),
            anchor_logprobs_T=batch.anchor_logprobs_T.to(self.device),
            sampler_logprobs_T=batch.sampler_logprobs_T.to(self.device),
            advantages_T=batch.advantages_T.to(self.device),
            age_T=version - batch.policy_versions_T.to(self.device),
            mask_T=mask_T,
        )

    def _loss(self, objective: Objective, version: int, batch: MicroBatch, logits_BSV: torch.Tensor) -> MegatronLoss:
        token_loss = objective(self._streams(batch, version, logits_BSV))
        loss = total(token_loss.loss_T, batch.share_T.to(self.device))
        # Megatron may scale the loss it is given in place: the recorded value is a copy.
        metrics = {**token_loss.metrics, "loss/total": Sum(loss.detach().clone())}
        return MegatronLoss(loss, torch.ones((), dtype=torch.int, device=self.device), metrics)

    def _collect(self, batch: MicroBatch, logits_BSV: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        return self._streams(batch, 0, logits_BSV).logprobs_T


def _rows(batch: MicroBatch, longest: int) -> torch.Tensor:
    """Where each of the T tokens stands in the flattened [B x S] grid."""
    starts = [index * longest for index in range(len(batch.lengths))]
    return torch.cat([torch.arange(start, start + n) for start, n in zip(starts, batch.lengths, strict=True)])


def read_metrics(collected: list[Mapping[str, Metric[torch.Tensor]]]) -> StepMetrics:
    """Micro-batches' metrics as numbers, read from the device in one transfer and combined."""
    flat = [(name, metric) for metrics in collected for name, metric in metrics.items()]
    if not flat:
        return StepMetrics()
    numbers = iter(torch.stack([value.double() for _, metric in flat for value in _values(metric)]).tolist())
    result = StepMetrics()
    for name, metric in flat:
        result.add(name, _with_values(metric, [next(numbers) for _ in _values(metric)]))
    return result


def _values(metric: Metric[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    match metric:
        case Mean(total=numerator, weight=weight):
            return numerator, weight
        case Sum(value=value) | Max(value=value) | Last(value=value):
            return (value,)


def _with_values(metric: Metric[torch.Tensor], numbers: list[float]) -> Metric[float]:
    return type(metric)(*numbers)  # type: ignore[arg-type,return-value]
