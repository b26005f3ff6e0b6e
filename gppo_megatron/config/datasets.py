"""The sections of `data:`, a kind each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


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
    "programs",
    "apps",
    "livecodebench",
    "human_eval",
    "mbpp",
]
TemplateName = Literal[
    "none",
    "boxed_user",
    "qwen_boxed",
    "dapo",
    "r1_zero",
    "gsm8k",
    "plain_question",
    "python_block",
    "bare_program",
]


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
