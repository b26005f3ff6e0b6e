"""The `Policy` on Megatron-Core: its schedule, its optimizer, its learning-rate scheduler."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.schema import Optimizer
from gppo_megatron.errors import GppoError
from gppo_megatron.metrics import Last, StepMetrics
from gppo_megatron.objective.policy_gradient import Objective
from gppo_megatron.policy.api import NamedTensor
from gppo_megatron.policy.megatron.forward import Forward, read_metrics
from gppo_megatron.policy.megatron.head import VocabShard
from gppo_megatron.policy.megatron.weights import WeightExporter
from gppo_megatron.types import TrainBatch


@dataclass(frozen=True)
class MegatronModel:
    """A loaded model, shared by the stages of a run."""

    chunks: list[DistributedDataParallel]
    architecture: Architecture
    forward: Forward
    export: WeightExporter


def loaded_model(
    chunks: list[DistributedDataParallel], architecture: Architecture, temperature: float, device: torch.device
) -> MegatronModel:
    """Collective: bind a filled model to the temperature its log-probs are taken at."""
    columns = architecture.padded_vocab(parallel_state.get_tensor_model_parallel_world_size())
    columns //= parallel_state.get_tensor_model_parallel_world_size()
    shard = VocabShard(
        start=columns * parallel_state.get_tensor_model_parallel_rank(),
        vocab=architecture.vocab,
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    return MegatronModel(
        chunks, architecture, Forward(shard, temperature, device), WeightExporter(chunks, architecture)
    )


class MegatronPolicy:
    """One stage's training of a model, with an optimizer of its own; see `policy.api.Policy`."""

    def __init__(self, model: MegatronModel, config: Optimizer, optimizer_steps: int, version: int = 0) -> None:
        """Collective. optimizer_steps: how many this stage takes in all; version: of the weights as they are."""
        self._model = model
        self._version = version
        self._reports = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        self._optimizer = get_megatron_optimizer(_optimizer_config(config, model.chunks[0]), model.chunks)
        self._scheduler = _scheduler(config, self._optimizer, optimizer_steps)

    @property
    def version(self) -> int:
        return self._version

    def update(self, batch: TrainBatch, objective: Objective) -> StepMetrics:
        """Collective: one optimizer step. Raises GppoError when the gradient is not finite.

        The metrics come from one rank of each replica, so that sums over ranks count nothing twice.
        """
        for chunk in self._model.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        metrics = read_metrics(
            self._run(partial(self._model.forward.train, objective, self._version), batch, forward_only=False)
        )
        learning_rate = self._optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self._optimizer.step()
        if not math.isfinite(grad_norm):
            raise GppoError(
                f"optimizer step {self._version + 1}: the gradient norm is {grad_norm}; "
                "lower the stage's optimizer.lr, or set objective.ratio_cap"
            )
        self._scheduler.step(increment=1)
        self._version += 1
        metrics.add("optimizer/grad_norm", Last(float(grad_norm)))
        metrics.add("optimizer/lr", Last(float(learning_rate)))
        return metrics if self._reports else StepMetrics()

    @torch.no_grad()
    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Collective: the batch with this policy's log-probs as anchor, on the pipeline stage that uses them."""
        scored = self._run(self._model.forward.score, batch, forward_only=True)
        if not scored:
            return batch
        pairs = zip(batch.micro_batches, scored, strict=True)
        return replace(batch, micro_batches=tuple(micro.with_anchor(logprobs.cpu()) for micro, logprobs in pairs))

    def weights(self) -> Iterator[NamedTensor]:
        """Collective: see `WeightExporter`."""
        return self._model.export()

    def _run(self, step: object, batch: TrainBatch, forward_only: bool) -> list:  # type: ignore[type-arg]
        """Megatron's schedule over the micro-batches; what the last stage's loss function recorded, [] elsewhere."""
        longest = max(max(micro.lengths) for micro in batch.micro_batches)
        return get_forward_backward_func()(  # type: ignore[no-any-return]
            forward_step_func=step,
            data_iterator=iter(batch.micro_batches),
            model=self._model.chunks,
            num_microbatches=len(batch.micro_batches),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _optimizer_config(config: Optimizer, chunk: DistributedDataParallel) -> OptimizerConfig:
    dtype = chunk.config.params_dtype
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad or math.inf,  # at 0 only some of its optimizers would measure the norm
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )


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
