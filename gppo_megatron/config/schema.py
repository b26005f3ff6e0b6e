"""Every key of a run's YAML, with its default. Units: sequences, tokens, seconds.

Own only what this project vouches for; `megatron:` passes the rest to Megatron-Core's TransformerConfig.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gppo_megatron.config.datasets import AdapterName as AdapterName
from gppo_megatron.config.datasets import FileData as FileData
from gppo_megatron.config.datasets import ReasoningGymData as ReasoningGymData
from gppo_megatron.config.datasets import TemplateName as TemplateName
from gppo_megatron.config.judging import Judge as Judge
from gppo_megatron.config.judging import LocalCode as LocalCode
from gppo_megatron.config.judging import ServiceCode as ServiceCode
from gppo_megatron.config.keeping import GapAlarm as GapAlarm
from gppo_megatron.config.keeping import Save as Save
from gppo_megatron.config.keeping import Wandb as Wandb
from gppo_megatron.config.keeping import Watchdog as Watchdog
from gppo_megatron.config.numbers import Fp8 as Fp8
from gppo_megatron.config.numbers import OptimizerState as OptimizerState
from gppo_megatron.config.numbers import Precision as Precision
from gppo_megatron.config.objectives import Diagnostics as Diagnostics
from gppo_megatron.config.objectives import EntropyBonus as EntropyBonus
from gppo_megatron.config.objectives import MaskedSampling as MaskedSampling
from gppo_megatron.config.objectives import Objective as Objective
from gppo_megatron.config.objectives import OffPolicyRejection as OffPolicyRejection
from gppo_megatron.config.objectives import ReferenceKl as ReferenceKl
from gppo_megatron.config.objectives import SequenceRejection as SequenceRejection
from gppo_megatron.config.objectives import TruncatedSampling as TruncatedSampling
from gppo_megatron.config.rollouts import EmbeddedRollout, SglangRollout, VllmRollout
from gppo_megatron.config.sources import Filtering as Filtering
from gppo_megatron.config.sources import Mask as Mask
from gppo_megatron.config.sources import MeanScore as MeanScore
from gppo_megatron.config.sources import NoSignal as NoSignal
from gppo_megatron.config.sources import Prefetch as Prefetch
from gppo_megatron.config.sources import SoftPenalty as SoftPenalty
from gppo_megatron.config.sources import Unfinished as Unfinished


@dataclass(frozen=True)
class TinyModel:
    """A randomly initialised Qwen3 with one token a character, written to the run folder as a Hugging Face model.

    experts: of every layer, in a Qwen3-MoE; 0 for the dense Qwen3. expert_ffn: width of each.
    """

    kind: Literal["tiny"] = "tiny"
    alphabet: str = "0123456789+-*/=(). "
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 192
    tied: bool = True
    experts: int = 0
    experts_per_token: int = 2
    expert_ffn: int = 64


@dataclass(frozen=True)
class HfModel:
    """A Hugging Face model folder; the architecture is read from its config.json."""

    path: str
    kind: Literal["hf"] = "hf"


@dataclass(frozen=True)
class Parallel:
    """Processes = tensor x pipeline x data x context.

    context: processes that share each sequence. virtual_stages: parts of the model on each pipeline process, which
    takes them in turn. sequence: the tensor-parallel processes also share what lies between their layers.
    overlap_gradients, overlap_parameters: reduce and gather while the backward and forward pass still compute.
    expert x expert_tensor of the tensor x context x data processes of a pipeline stage share its experts.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    virtual_stages: int = 1
    sequence: bool = False
    overlap_gradients: bool = False
    overlap_parameters: bool = False
    expert: int = 1
    expert_tensor: int = 1

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data * self.context


@dataclass(frozen=True)
class Memory:
    """What is traded for memory.

    distributed_optimizer: the replicas share the optimizer's state instead of each holding all of it.
    recompute: activations computed again in the backward pass: those of recompute_modules, or of all layers (full),
    kept only at the start of every recompute_layers of them.
    """

    distributed_optimizer: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] = ("mlp",)
    recompute_layers: int = 1


@dataclass(frozen=True)
class Optimizer:
    """AdamW with Megatron-Core's schedule; weight decay spares norms and biases.

    warmup_steps and decay_steps count optimizer steps; decay_steps defaults to the whole stage.
    max_skipped: how many steps in a row may be left out because their gradient is not finite; one more ends the run.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0
    max_skipped: int = 3
    state: OptimizerState = field(default_factory=OptimizerState)


@dataclass(frozen=True)
class Batch:
    """One unit throughout: sequences.

    sequences: responses a rollout step samples; prompts = sequences / group.
    updates: optimizer steps a rollout, each on sequences / updates of them.
    micro_batch_tokens: most tokens, padding included, in one forward pass of a replica.
    arrangement: sequences end to end (packed), or side by side, each padded to the longest.
    """

    sequences: int = 256
    group: int = 8
    updates: int = 4
    micro_batch_tokens: int = 8192
    arrangement: Literal["packed", "padded"] = "packed"

    @property
    def prompts(self) -> int:
        return self.sequences // self.group


@dataclass(frozen=True)
class Warmup:
    """Supervised cold start on the training problems' reference answers."""

    steps: int
    sequences: int = 64
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=1e-5))


@dataclass(frozen=True)
class Evaluation:
    """Sampled accuracy on held-out problems, `samples` each, every `every` steps and at the end."""

    every: int = 20
    prompts: int = 256
    samples: int = 1


@dataclass(frozen=True)
class RunConfig:
    """One run. `run` is the folder it writes; it must not exist yet. steps counts rollouts.

    threads: CPU threads of each process; more than 1 slows small models down.
    """

    run: str
    steps: int
    model: TinyModel | HfModel
    data: ReasoningGymData | FileData
    rollout: EmbeddedRollout | VllmRollout | SglangRollout
    seed: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = field(default_factory=Precision)
    threads: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    memory: Memory = field(default_factory=Memory)
    batch: Batch = field(default_factory=Batch)
    filtering: Filtering = field(default_factory=Filtering)
    prefetch: Prefetch = field(default_factory=Prefetch)
    objective: Objective = field(default_factory=Objective)
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    optimizer: Optimizer = field(default_factory=Optimizer)
    warmup: Warmup | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    judge: Judge = field(default_factory=Judge)
    save: Save = field(default_factory=Save)
    watchdog: Watchdog = field(default_factory=Watchdog)
    gap_alarm: GapAlarm = field(default_factory=GapAlarm)
    wandb: Wandb | None = None
    megatron: Mapping[str, Any] = field(default_factory=dict)
