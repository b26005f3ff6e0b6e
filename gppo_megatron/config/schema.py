"""Every key of a run's YAML, with its default. Units: sequences, tokens, seconds.

Own only what this project vouches for; `megatron:` passes the rest to Megatron-Core's TransformerConfig.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class TinyModel:
    """A randomly initialised Qwen3 with one token a character, written to the run folder as a Hugging Face model."""

    kind: Literal["tiny"] = "tiny"
    alphabet: str = "0123456789+-*/=(). "
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 192
    tied: bool = True


@dataclass(frozen=True)
class HfModel:
    """A Hugging Face model folder; the architecture is read from its config.json."""

    path: str
    kind: Literal["hf"] = "hf"


@dataclass(frozen=True)
class Parallel:
    """Processes = tensor x pipeline x data."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def processes(self) -> int:
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class Optimizer:
    """AdamW with Megatron-Core's schedule; weight decay spares norms and biases.

    warmup_steps and decay_steps count optimizer steps; decay_steps defaults to the whole stage.
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


@dataclass(frozen=True)
class Batch:
    """One unit throughout: sequences.

    sequences: responses a rollout step samples; prompts = sequences / group.
    updates: optimizer steps a rollout, each on sequences / updates of them.
    micro_batch_tokens: most tokens, padding included, in one forward pass of a rank.
    """

    sequences: int = 256
    group: int = 8
    updates: int = 4
    micro_batch_tokens: int = 8192

    @property
    def prompts(self) -> int:
        return self.sequences // self.group


@dataclass(frozen=True)
class ReasoningGymData:
    """Procedural tasks with their own verifiers, from the `reasoning-gym` package.

    task: its registered name; options: arguments of its dataset.
    prompt: how a problem is written; {question} and every metadata field may be used.
    remove: characters deleted from the written prompt.
    holdout: share of distinct problems kept for evaluation and never trained on.
    pool: problems drawn to split from; threshold: score from which an answer counts as right (1), else wrong (0).
    """

    task: str
    kind: Literal["reasoning_gym"] = "reasoning_gym"
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = "{question}"
    remove: str = ""
    chat: bool = False
    holdout: float = 0.1
    pool: int = 10_000
    threshold: float = 1.0


AdapterName = Literal[
    "plain",
    "gsm8k",
    "math500",
    "aime",
    "amc",
    "olympiadbench",
    "minerva",
    "deepscaler",
    "dapo_math",
    "eurus2_math",
    "eurus2_code",
]
TemplateName = Literal["none", "boxed_user", "qwen_boxed", "dapo", "r1_zero", "gsm8k", "plain_question"]


@dataclass(frozen=True)
class FileData:
    """Problems with known answers from parquet, JSON lines or JSON.

    path: a file, a folder, or a pattern such as `data/train-*.parquet`.
    adapter: how a row is read; columns: {prompt: ..., answer: ...}, the columns to read instead of the adapter's own.
    template: how a problem is written, and with that where its answer is looked for.
    chat: write it with the tokenizer's chat template, not with the template's literal form.
    max_prompt_tokens: problems longer than that, as written, are left out.
    evaluation: path of the problems to evaluate on, read with evaluation_adapter (null: adapter);
        evaluation_repeats keeps those that are listed more than once.
    holdout: where `evaluation` is null, the share of distinct problems kept for it and never trained on.
    strict: refuse data of which anything would be left out.
    """

    path: str
    kind: Literal["files"] = "files"
    adapter: AdapterName = "plain"
    columns: Mapping[str, str] = field(default_factory=dict)
    template: TemplateName = "boxed_user"
    chat: bool = False
    max_prompt_tokens: int = 1024
    evaluation: str | None = None
    evaluation_adapter: AdapterName | None = None
    evaluation_repeats: bool = False
    holdout: float = 0.1
    strict: bool = False


@dataclass(frozen=True)
class EmbeddedRollout:
    """Sampling inside the trainer's own processes.

    cache_tokens: most tokens (rows x length) the key-value cache of one sampling batch holds.
    """

    max_new_tokens: int
    kind: Literal["embedded"] = "embedded"
    temperature: float = 1.0
    cache_tokens: int = 65_536


@dataclass(frozen=True)
class Judge:
    """Verifiers run in worker processes; timeout is the seconds one answer may take."""

    timeout: float = 10.0
    workers: int = 1


@dataclass(frozen=True)
class Objective:
    """A preset, and whatever of it is to be changed; None keeps the preset's value.

    delta sets both thresholds, delta_low (A < 0, ratio below 1) and delta_high (A > 0, ratio above 1) one each.
    ratio_cap: largest weight a token's ratio may have. dual_clip: largest weight where A < 0.
    ratio_guard: [low, high], an outer ratio interval on top of the cell.
    length: the constant of `constant_length`; defaults to rollout.max_new_tokens.
    """

    preset: str = "gppo"
    divergence: str | None = None
    alpha: float | None = None
    estimator: str | None = None
    delta: float | None = None
    delta_low: float | None = None
    delta_high: float | None = None
    ratio_cap: float | None = None
    dual_clip: float | None = None
    ratio_guard: tuple[float, float] | None = None
    advantage: Literal["mean", "mean_std", "leave_one_out"] | None = None
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] | None = None
    length: int | None = None
    anchor: Literal["rollout", "recomputed"] = "rollout"


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
class Save:
    """Hugging Face folders: `<run>/hf` at the end, and `<run>/hf-step-N` every `every` steps (0: never)."""

    every: int = 0


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases, besides the files of the run folder; needs the extra `wandb`.

    name: of the run, by default its folder's; entity: the account or team. offline: `wandb sync` uploads later.
    """

    project: str
    name: str | None = None
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


@dataclass(frozen=True)
class RunConfig:
    """One run. `run` is the folder it writes; it must not exist yet. steps counts rollouts.

    threads: CPU threads of each process; more than 1 slows small models down.
    """

    run: str
    steps: int
    model: TinyModel | HfModel
    data: ReasoningGymData | FileData
    rollout: EmbeddedRollout
    seed: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    batch: Batch = field(default_factory=Batch)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    warmup: Warmup | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    judge: Judge = field(default_factory=Judge)
    save: Save = field(default_factory=Save)
    wandb: Wandb | None = None
    megatron: Mapping[str, Any] = field(default_factory=dict)
