"""One micro-batch through the model: flat sequences in, per-token statistics and the scaled loss out.

Letters: T tokens of the micro-batch, B sequences, S the longest, H hidden size, N predictions with loss.
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
from gppo_megatron.policy.megatron.head import TokenStatistics, VocabShard, token_statistics
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

    def train(self, objective: Objective, version: int, batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        """A Megatron forward step whose loss is `objective` on weights of `version`; bind those two by `partial`."""
        batch = next(batches)
        return self._statistics(batch, model), partial(self._loss, objective, version, batch)

    def score(self, batches: Iterator[MicroBatch], model: Any) -> tuple[Any, Any]:
        """A Megatron forward step that collects logprobs_T."""
        batch = next(batches)
        return self._statistics(batch, model), partial(self._collect, batch)

    def _statistics(self, batch: MicroBatch, model: Any) -> Any:
        """TokenStatistics of the last pipeline stage, hidden states elsewhere. Causal attention never sees right
        padding."""
        tokens_BS = pad_sequence(list(torch.split(batch.tokens_T, list(batch.lengths))), batch_first=True).to(
            self.device
        )
        positions_BS = torch.arange(tokens_BS.shape[1], device=self.device).expand_as(tokens_BS)
        return model(tokens_BS, positions_BS, None, output_processor=partial(self._head, batch))

    def _head(
        self,
        batch: MicroBatch,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: torch.Tensor | None,
        **_: Any,
    ) -> TokenStatistics:
        """Megatron's output processor: the rows of hidden_states [S, B, H] that carry loss, through the head."""
        picked_N = _picked(batch)
        places = _places(batch)
        hidden_NH = hidden_states[
            places.position_T[picked_N].to(self.device), places.sequence_T[picked_N].to(self.device)
        ]
        weight_VH = output_layer.weight if output_weight is None else output_weight
        labels_N = batch.labels_T[picked_N].to(self.device)
        return token_statistics(hidden_NH, weight_VH, labels_N, self.shard, self.temperature)

    def _streams(self, batch: MicroBatch, version: int, statistics: TokenStatistics) -> TokenStreams:
        """Statistics of the predictions that carry loss; 0 elsewhere."""
        picked_N = _picked(batch).to(self.device)
        mask_T = batch.mask_T.to(self.device)
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

    def _loss(self, objective: Objective, version: int, batch: MicroBatch, statistics: TokenStatistics) -> MegatronLoss:
        token_loss = objective(self._streams(batch, version, statistics))
        loss = total(token_loss.loss_T, batch.share_T.to(self.device))
        # Megatron may scale the loss it is given in place: the recorded value is a copy.
        metrics = {**token_loss.metrics, "loss/total": Sum(loss.detach().clone())}
        return MegatronLoss(loss, torch.ones((), dtype=torch.int, device=self.device), metrics)

    def _collect(self, batch: MicroBatch, statistics: TokenStatistics, non_loss_data: bool = True) -> torch.Tensor:
        return self._streams(batch, 0, statistics).logprobs_T


def _picked(batch: MicroBatch) -> torch.Tensor:
    """Which of the T tokens run through the head: int64 [N], on the CPU.

    A micro-batch without loss still runs one row, so that every rank has a graph to go backward through.
    """
    return batch.mask_T.nonzero().squeeze(1) if batch.mask_T.any() else torch.zeros(1, dtype=torch.int64)


class Places(NamedTuple):
    """Where each of the T tokens stands in the [S x B] grid; int64, on the CPU."""

    position_T: torch.Tensor
    sequence_T: torch.Tensor


def _places(batch: MicroBatch) -> Places:
    lengths_B = torch.tensor(batch.lengths)
    return Places(
        position_T=torch.cat([torch.arange(length) for length in batch.lengths]),
        sequence_T=torch.arange(len(lengths_B)).repeat_interleave(lengths_B),
    )


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
