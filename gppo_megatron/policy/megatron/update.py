"""The `Policy` on Megatron-Core: its schedule, its optimizer, its learning-rate scheduler."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.flops import training_flops
from gppo_megatron.config.schema import Optimizer
from gppo_megatron.errors import ConfigError, GppoError
from gppo_megatron.metrics import Last, StepMetrics, Sum
from gppo_megatron.objective.policy_gradient import Objective
from gppo_megatron.policy.api import NamedTensor
from gppo_megatron.policy.megatron import not_finite
from gppo_megatron.policy.megatron.arrangement import Arrangement, EndToEnd, Shares
from gppo_megatron.policy.megatron.divergence import HeadDivergence
from gppo_megatron.policy.megatron.export import WeightExporter
from gppo_megatron.policy.megatron.forward import Forward, HeadEstimates, read_metrics
from gppo_megatron.policy.megatron.head import VocabShard
from gppo_megatron.policy.megatron.model import HAVE_TRANSFORMER_ENGINE
from gppo_megatron.policy.megatron.optimizer_state import load_optimizer, optimizer_state
from gppo_megatron.policy.megatron.precision import optimizer_fields, token_multiple
from gppo_megatron.policy.megatron.routing import replayed
from gppo_megatron.policy.megatron.scoring import AnchorLogprobs, Measurement, ReferenceLogprobs
from gppo_megatron.policy.megatron.shards import ShardedState, load_weights, weights_state
from gppo_megatron.types import TrainBatch


@dataclass(frozen=True)
class MegatronModel:
    """A loaded model, shared by the stages of a run."""

    chunks: list[DistributedDataParallel]
    architecture: Architecture
    forward: Forward
    export: WeightExporter
    shares: Shares

    def replaying(self) -> Self:
        """The same model, whose tokens go to the experts that the sampler sent them to.

        The model must have experts, and its configuration must say `moe_enable_routing_replay`.
        """
        architecture = self.architecture
        assert architecture.experts is not None
        routing = replayed(self.chunks, architecture.layers, architecture.experts, self.shares)
        return replace(self, forward=replace(self.forward, routing=routing))


def loaded_model(
    chunks: list[DistributedDataParallel],
    architecture: Architecture,
    temperature: float,
    device: torch.device,
    arrange: Callable[[Shares], Arrangement] = EndToEnd,
) -> MegatronModel:
    """Collective: bind a filled model to the temperature its log-probs are taken at, and to how sequences stand."""
    columns = architecture.padded_vocab(parallel_state.get_tensor_model_parallel_world_size())
    columns //= parallel_state.get_tensor_model_parallel_world_size()
    shard = VocabShard(
        start=columns * parallel_state.get_tensor_model_parallel_rank(),
        vocab=architecture.vocab,
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    config = chunks[0].config
    shares = Shares(
        context=parallel_state.get_context_parallel_world_size(),
        rank=parallel_state.get_context_parallel_rank(),
        tensor=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        unit=token_multiple(config),
    )
    forward = Forward(
        shard,
        temperature,
        device,
        arrange(shares),
        config.sequence_parallel,
        parallel_state.get_context_parallel_group(),
    )
    return MegatronModel(chunks, architecture, forward, WeightExporter(chunks, architecture), shares)


class MegatronPolicy:
    """One stage's training of a model, with an optimizer of its own; see `policy.api.Policy`."""

    def __init__(
        self,
        model: MegatronModel,
        config: Optimizer,
        optimizer_steps: int,
        version: int = 0,
        divergence: HeadDivergence | None = None,
        exact: HeadDivergence | None = None,
    ) -> None:
        """Collective. optimizer_steps: how many this stage takes in all; version: of the weights as they are;
        divergence: what the head works out for the objective's trust region; exact: and for its diagnostics."""
        self._model = model
        self._estimates = HeadEstimates(divergence, exact)
        self._version = version
        self._reports = (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        )
        chunk = model.chunks[0]
        self._optimizer = get_megatron_optimizer(optimizer_config(config, chunk.config, chunk.ddp_config), model.chunks)
        self._scheduler = _scheduler(config, self._optimizer, optimizer_steps)
        self._max_skipped = config.max_skipped
        self._skipped_in_a_row = 0

    @property
    def version(self) -> int:
        return self._version

    def update(self, batch: TrainBatch, objective: Objective) -> StepMetrics:
        """Collective: one optimizer step, or none where the gradient is not finite: then weights, moments, schedule and
        version stay as they were, and nothing of the batch is measured.

        Raises GppoError when more than `max_skipped` steps in a row were skipped.
        The metrics come from one rank of each replica, so that sums over ranks count nothing twice.
        """
        self._zero_gradients()
        metrics = read_metrics(
            self._run(
                partial(self._model.forward.train, objective, self._version, self._estimates),
                batch,
                forward_only=False,
            )
        )
        # Megatron's own step would measure the norm and move the weights in one go.
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if self._any_process(not math.isfinite(grad_norm)):
            return self._skip(batch, grad_norm)
        learning_rate = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        self._scheduler.step(increment=1)
        self._version += 1
        self._skipped_in_a_row = 0
        metrics.add("speed/update_flops", Sum(float(self._flops(batch))))
        metrics.add("optimizer/grad_norm", Last(grad_norm))
        metrics.add("optimizer/lr", Last(float(learning_rate)))
        return (metrics if self._reports else StepMetrics()).merge(self._skipped(0))

    def _flops(self, batch: TrainBatch) -> int:
        """What the model's mathematics takes, padding and micro-batches without loss left out."""
        return sum(
            training_flops(self._model.architecture, micro.lengths, int(micro.mask_T.sum()))
            for micro in batch.micro_batches
            if micro.mask_T.any()
        )

    def _skip(self, batch: TrainBatch, grad_norm: float) -> StepMetrics:
        """Collective: say where the numbers broke, with one more forward pass over the batch."""
        place = not_finite.first_not_finite(self._model.chunks, partial(self.annotate, batch))
        self._zero_gradients()
        self._skipped_in_a_row += 1
        cause = "every layer's output is finite" if place is None else f"{place.name} gives the first NaN or infinity"
        text = f"optimizer step {self._version + 1}: the gradient norm is {grad_norm}; {cause}"
        if self._skipped_in_a_row > self._max_skipped:
            raise GppoError(
                f"{text}; tried {self._skipped_in_a_row} times in a row, more often than optimizer.max_skipped = "
                f"{self._max_skipped} allows; lower the stage's optimizer.lr, or set objective.ratio_cap"
            )
        if dist.get_rank() == 0:
            print(f"{text}; this batch is skipped", file=sys.stderr, flush=True)
        return self._skipped(1)

    def _skipped(self, steps: int) -> StepMetrics:
        """From one process of the world, for all."""
        one = self._reports and parallel_state.get_data_parallel_rank() == 0
        return StepMetrics({"optimizer/skipped": Sum(float(steps))} if one else {})

    def _any_process(self, holds: bool) -> bool:
        """Collective over the world: all go the same way, whatever rounding made of each one's number."""
        flag = torch.tensor(holds, dtype=torch.int32, device=self._model.forward.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _zero_gradients(self) -> None:
        for chunk in self._model.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Collective: the batch with this policy's log-probs as anchor, on the pipeline stage that uses them."""
        return self.score((AnchorLogprobs(),), batch)

    def score(self, measurements: Sequence[Measurement], batch: TrainBatch) -> TrainBatch:
        """Collective, one forward pass: the batch with all `measurements`, on the pipeline stage that uses them.

        Raises GppoError where one of them cannot measure this batch.
        """
        self._complete_parameters()
        return measured(self._model, measurements, self._version, batch)

    def weights(self) -> Iterator[NamedTensor]:
        """Collective: see `WeightExporter`."""
        self._complete_parameters()
        return self._model.export()

    def _complete_parameters(self) -> None:
        """Collective: where the next forward pass of training would gather the parameters, gather them now."""
        for chunk in self._model.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def state(self, loading: bool = False) -> ShardedState:
        """Collective: all that training goes on from, for `shards`. loading: to be filled by reading."""
        self._complete_parameters()
        weights = weights_state(self._model.chunks)
        progress = {"version": self._version, "schedule": self._scheduler.num_steps, "skipped": self._skipped_in_a_row}
        return {**weights, "optimizer": optimizer_state(self._optimizer, weights, loading), "progress": progress}

    def restore(self, read: ShardedState) -> None:
        """Collective: go on from what was read for `state(loading=True)`."""
        load_weights(self._model.chunks, read)
        load_optimizer(self._optimizer, read["optimizer"])
        self._scheduler.num_steps = read["progress"]["schedule"]
        self._scheduler.step(increment=0)  # the rates of this place in the schedule
        self._version = read["progress"]["version"]
        self._skipped_in_a_row = read["progress"]["skipped"]

    def _run(self, step: object, batch: TrainBatch, forward_only: bool) -> list:  # type: ignore[type-arg]
        return run_schedule(self._model, step, batch, forward_only)


@dataclass(frozen=True)
class ReferenceScorer:
    """A frozen model whose log-probs a KL penalty compares with; see `train.Run.scorers`."""

    model: MegatronModel

    def __call__(self, batch: TrainBatch) -> TrainBatch:
        """Collective: the batch with this model's log-probs as reference, on the pipeline stage that uses them."""
        return measured(self.model, (ReferenceLogprobs(),), 0, batch)


def run_schedule(model: MegatronModel, step: object, batch: TrainBatch, forward_only: bool) -> list:  # type: ignore[type-arg]
    """Megatron's schedule over the micro-batches; what the last stage's loss function recorded, [] elsewhere."""
    placed = model.forward.place(batch.micro_batches, one_shape=len(model.chunks) > 1)
    iterators = [iter(placed) for _ in model.chunks]
    recorded: list = get_forward_backward_func()(  # type: ignore[type-arg]
        forward_step_func=step,
        data_iterator=iterators if len(model.chunks) > 1 else iterators[0],
        model=model.chunks,
        num_microbatches=len(placed),
        seq_length=max(item.grid.length for item in placed) * model.forward.context.size(),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    model.forward.routing.end(model.chunks)
    return recorded


@torch.no_grad()
def measured(model: MegatronModel, measurements: Sequence[Measurement], version: int, batch: TrainBatch) -> TrainBatch:
    """Collective, one forward pass: the batch with what `measurements` find on weights of `version`."""
    for micro in batch.micro_batches:
        for measurement in measurements:
            measurement.check(micro, version)
    scored = run_schedule(model, partial(model.forward.score, measurements, version), batch, forward_only=True)
    if not scored:
        return batch
    micro_batches = list(batch.micro_batches)
    for place, values in enumerate(scored):
        if micro_batches[place].mask_T.any():
            for measurement, value in zip(measurements, values, strict=True):
                micro_batches[place] = measurement.attach(micro_batches[place], value)
    return replace(batch, micro_batches=tuple(micro_batches))


def optimizer_config(config: Optimizer, megatron: TransformerConfig, reduction: Any) -> OptimizerConfig:
    """reduction: the DistributedDataParallelConfig. Raises ConfigError where this state needs what is not installed."""
    ours: dict[str, Any] = {
        "optimizer": "adam",
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "adam_eps": config.eps,
        "clip_grad": config.clip_grad or math.inf,  # at 0 only some of its optimizers would measure the norm
        "use_distributed_optimizer": reduction.use_distributed_optimizer,
        "overlap_param_gather": reduction.overlap_param_gather,
    }
    if not config.state.plain and not HAVE_TRANSFORMER_ENGINE:
        raise ConfigError("optimizer.state: anything but float32 needs Transformer Engine, which is not installed")
    return OptimizerConfig(**ours, **optimizer_fields(megatron, config.state))


def _scheduler(config: Optimizer, optimizer: object, optimizer_steps: int) -> OptimizerParamScheduler:
    """Megatron's schedule; it also gives norms and biases their weight-decay multiplier of 0.

    By default min_lr is reached just after the last step, so that no step is taken at a rate of 0.
    """
    decay_steps = config.decay_steps or max(optimizer_steps, config.warmup_steps) + 1
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    scheduler.step(increment=1)  # the first optimizer step is step 1 of the warm-up: never at a rate of 0
    return scheduler
