"""One micro-batch through the model: flat sequences in, per-token statistics and the scaled loss out.

Letters: T tokens of the micro-batch, S places x B columns of the grid, H hidden size, N predictions with loss, M of
them on this context-parallel process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from gppo_megatron.metrics import Last, Max, Mean, Metric, StepMetrics, Sum
from gppo_megatron.objective.policy_gradient import Objective, Seen, TokenStreams
from gppo_megatron.objective.reduce import total
from gppo_megatron.policy.megatron.arrangement import ELSEWHERE, Arrangement, Grid
from gppo_megatron.policy.megatron.divergence import HeadDivergence, HeadRows
from gppo_megatron.policy.megatron.head import TokenStatistics, VocabShard, token_statistics
from gppo_megatron.policy.megatron.routing import OwnRouting, Routing
from gppo_megatron.policy.megatron.scoring import Measurement, Scored
from gppo_megatron.types import MicroBatch


class MegatronLoss(NamedTuple):
    """What Megatron's schedules expect of a loss function; with three members and `calculate_per_token_loss`
    they divide the loss by nothing. num_tokens is unused: the denominators are in the loss."""

    loss: torch.Tensor
    num_tokens: torch.Tensor
    recorded: "Recorded"


class Recorded(NamedTuple):
    """Of one micro-batch. seen: what is measured of the whole step's tokens."""

    metrics: Mapping[str, Metric[torch.Tensor]]
    seen: Seen | None


class Placed(NamedTuple):
    """A micro-batch and its grid."""

    batch: MicroBatch
    grid: Grid


@dataclass(frozen=True)
class Forward:
    """Runs micro-batches through one model; the log-probs are those at `temperature`, as sampled.

    sequence_parallel: whether hidden states are cut over the tensor-parallel group.
    context: the context-parallel group. routing: which experts tokens go to.
    """

    shard: VocabShard
    temperature: float
    device: torch.device
    arrangement: Arrangement
    sequence_parallel: bool
    context: Any
    routing: Routing = OwnRouting()  # noqa: RUF009 - stateless

    def place(self, batches: Sequence[MicroBatch], one_shape: bool) -> list[Placed]:
        """The grid of each; one_shape: all as long as the longest, as a schedule without varying lengths needs."""
        grids = [self.arrangement.place(batch) for batch in batches]
        if one_shape:
            longest = max(grid.length for grid in grids) * self.context.size()
            grids = [self.arrangement.place(batch, longest) for batch in batches]
        return [Placed(batch, grid) for batch, grid in zip(batches, grids, strict=True)]

    def train(
        self,
        objective: Objective,
        version: int,
        estimates: "HeadEstimates",
        batches: Iterator[Placed],
        model: Any,
    ) -> tuple[Any, Any]:
        """A Megatron forward step whose loss is `objective` on weights of `version`; bind these by `partial`."""
        placed = next(batches)
        output = self._run(placed, model, partial(self._train_head, placed, model, estimates))
        return output, partial(self._loss, objective, version, placed.batch)

    def score(
        self, measurements: Sequence[Measurement], version: int, batches: Iterator[Placed], model: Any
    ) -> tuple[Any, Any]:
        """A Megatron forward step that collects what `measurements` measure, in their order."""
        placed = next(batches)
        output = self._run(placed, model, partial(self._score_head, placed, model, measurements, version))
        return output, lambda measured, non_loss_data=True: measured.values

    def _run(self, placed: Placed, model: Any, output_processor: Any) -> Any:
        """What the processor makes of the last pipeline stage's hidden states; hidden states elsewhere."""
        grid = placed.grid
        packed = grid.packed
        if packed is not None:
            bounds = packed.cu_seqlens_q.to(self.device)
            packed = replace(packed, cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        with self.routing.during(placed.batch, grid, model):
            return model(
                grid.tokens_BS.to(self.device),
                grid.positions_BS.to(self.device),
                None,
                packed_seq_params=packed,
                output_processor=output_processor,
            )

    def _train_head(self, placed: Placed, model: Any, estimates: "HeadEstimates", **stage: Any) -> "HeadOutput":
        """Megatron's output processor for training."""
        rows = self._rows(placed, model, **stage)
        own = _statistics(rows)
        statistics = TokenStatistics(*(self._of_all(placed, values_M) for values_M in own))
        measured = (self._measured(placed, rows, own, estimator) for estimator in estimates)
        return HeadOutput(statistics, *measured)

    def _measured(
        self, placed: Placed, rows: HeadRows, own: TokenStatistics, estimator: HeadDivergence | None
    ) -> torch.Tensor | None:
        """Collective: of all N predictions with loss; 0 where there is none."""
        if estimator is None:
            return None
        if not placed.batch.mask_T.any():
            return torch.zeros_like(own.top_logits_N)
        return self._of_all(placed, estimator(rows, own, placed.batch))

    def _score_head(
        self, placed: Placed, model: Any, measurements: Sequence[Measurement], version: int, **stage: Any
    ) -> "MeasuredRows":
        """Megatron's output processor for scoring."""
        rows = self._rows(placed, model, **stage)
        own = _statistics(rows)
        logprobs_N = self._of_all(placed, own.logprobs_N)
        scored = Scored(rows, own, logprobs_N, version)
        return MeasuredRows([measurement.measure(scored) for measurement in measurements], self.device)

    def _rows(
        self,
        placed: Placed,
        model: Any,
        *,
        hidden_states: torch.Tensor,
        output_layer: Any,
        output_weight: torch.Tensor | None,
        **_: Any,
    ) -> HeadRows:
        """The rows of hidden_states [S, B, H] that carry loss and are on this context-parallel process.

        A process without any runs a row all the same, whose result goes nowhere.
        """
        if self.sequence_parallel:
            # The head's gradient is already the sum over its shards: adding it up once more would double it.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        here_M = _here(placed)
        picked_M = _picked(placed.batch)[here_M] if len(here_M) else torch.zeros(1, dtype=torch.int64)
        rows_M = placed.grid.place_T[picked_M] if len(here_M) else picked_M
        hidden_MH = hidden_states.flatten(0, 1)[rows_M.to(self.device)]
        weight_VH = output_layer.weight if output_weight is None else output_weight
        _complete(weight_VH, model)
        labels_M = placed.batch.labels_T[picked_M].to(self.device)
        return HeadRows(hidden_MH, weight_VH, labels_M, self.shard, self.temperature, picked_M)

    def _of_all(self, placed: Placed, values_M: torch.Tensor) -> torch.Tensor:
        """Collective: [N], each from the context-parallel process that has it.

        Every process goes on with all N and so computes the whole loss: the gradient of its own values is complete.
        One that has none of them joins the graph all the same. What is not finite stays with its own row.
        """
        if self.context.size() == 1:
            return values_M
        here_M = _here(placed).to(self.device)
        whole_N = values_M.new_zeros(len(_picked(placed.batch)))
        if len(here_M):
            whole_N = whole_N.index_put((here_M,), values_M)
        elif values_M.requires_grad:
            whole_N = whole_N + (values_M * 0).sum()
        return reduce_from_tensor_model_parallel_region(whole_N, group=self.context)  # type: ignore[no-any-return]

    def _streams(self, batch: MicroBatch, version: int, output: "HeadOutput") -> TokenStreams:
        """Statistics of the predictions that carry loss; 0 elsewhere."""
        picked_N, statistics = _picked(batch).to(self.device), output.statistics
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
            lengths=batch.lengths,
            reference_logprobs_T=_on(self.device, batch.reference_logprobs_T),
            divergence_T=_put(zeros_T, picked_N, output.divergence_N),
            exact_T=_put(zeros_T, picked_N, output.exact_N),
            squares_T=zeros_T.index_put((picked_N,), statistics.squares_N.detach()),
        )

    def _loss(self, objective: Objective, version: int, batch: MicroBatch, output: "HeadOutput") -> MegatronLoss:
        token_loss = objective(self._streams(batch, version, output))
        loss = total(token_loss.loss_T, batch.share_T.to(self.device))
        # Megatron may scale the loss it is given in place: the recorded value is a copy.
        metrics = {**token_loss.metrics, "loss/total": Sum(loss.detach().clone())}
        return MegatronLoss(
            loss, torch.ones((), dtype=torch.int, device=self.device), Recorded(metrics, token_loss.seen)
        )


class MeasuredRows(NamedTuple):
    """What was measured. Megatron's schedules ask a model with experts for the device of its output."""

    values: list[Any]
    device: torch.device


class HeadEstimates(NamedTuple):
    """Divergences that the head works out in training, None where not asked for. divergence: what the trust region
    reads. exact: what the diagnostics compare it with.
    """

    divergence: HeadDivergence | None = None
    exact: HeadDivergence | None = None


class HeadOutput(NamedTuple):
    """divergence_N, exact_N: the two of `HeadEstimates`, without gradient; None where they are not asked for."""

    statistics: TokenStatistics
    divergence_N: torch.Tensor | None
    exact_N: torch.Tensor | None


def _complete(weight_VH: torch.Tensor, model: Any) -> None:
    """Collective: wait for this weight of a DistributedDataParallel model where it is still being gathered.

    Megatron waits before each module's forward, and the head is no module's.
    """
    if model.use_forward_hook:
        model.param_to_bucket_group[weight_VH].finish_param_sync()


def _here(placed: Placed) -> torch.Tensor:
    """Which of the N predictions with loss are on this context-parallel process: int64 [M], on the CPU."""
    return (placed.grid.place_T[_picked(placed.batch)] != ELSEWHERE).nonzero().squeeze(1)


def _statistics(rows: HeadRows) -> TokenStatistics:
    return token_statistics(rows.hidden_NH, rows.weight_VH, rows.labels_N, rows.shard, rows.temperature)


def _put(zeros_T: torch.Tensor, picked_N: torch.Tensor, values_N: torch.Tensor | None) -> torch.Tensor | None:
    return None if values_N is None else zeros_T.index_put((picked_N,), values_N)


def _on(device: torch.device, values_T: torch.Tensor | None) -> torch.Tensor | None:
    return None if values_T is None else values_T.to(device)


def _picked(batch: MicroBatch) -> torch.Tensor:
    """Which of the T tokens run through the head: int64 [N], on the CPU.

    A micro-batch without loss still runs one row, so that every rank has a graph to go backward through.
    """
    return batch.mask_T.nonzero().squeeze(1) if batch.mask_T.any() else torch.zeros(1, dtype=torch.int64)


def read_metrics(collected: Sequence[Recorded]) -> StepMetrics:
    """A step's metrics as numbers, read from the device in one transfer and combined."""
    seen = [recorded.seen for recorded in collected if recorded.seen is not None]
    of_step = [seen[0].measure(seen)] if seen else []
    metrics_of = [*(recorded.metrics for recorded in collected), *of_step]
    flat = [(name, metric) for metrics in metrics_of for name, metric in metrics.items()]
    if not flat:
        return StepMetrics()
    numbers = iter(torch.stack([value for _, metric in flat for value in _values(metric)]).tolist())
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
