"""Cross-field checks in exact words, the resolved objective, and the derived numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.checks import check, check_run_folder, check_world
from gppo_megatron.config.derived import count_parameters, derive, describe, resolve_objective
from gppo_megatron.config.load import load
from gppo_megatron.config.schema import Batch, Optimizer, RunConfig
from gppo_megatron.errors import ConfigError
from gppo_megatron.objective.presets import PRESETS, Cell

BASE = """\
run: runs/x
steps: 10
model: {kind: tiny}
data: {kind: reasoning_gym, task: chain_sum}
rollout: {max_new_tokens: 16}
batch: {sequences: 64, group: 8, updates: 4, micro_batch_tokens: 1024}
"""


def configure(folder: Path, *overrides: str) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text(BASE)
    return load(file, overrides)


def problems(config: RunConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(config, source="run.yaml")
    headline, *lines = str(caught.value).split("\n  ")
    assert headline == f"run.yaml: {len(lines)} problem{'s' * (len(lines) > 1)}"
    return lines


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallel.tensor=2", "parallel.pipeline=2", "parallel.data=4"),
        ("warmup.steps=5", "warmup.optimizer.warmup_steps=4", "optimizer.warmup_steps=39"),
        ("objective.preset=dr_grpo", "objective.length=100"),
        ("objective.divergence=alpha", "objective.alpha=0.5", "objective.delta_low=0.1"),
    ],
)
def test_what_can_work_passes(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    check(configure(tmp_path, *overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "batch.sequences=60",
            "batch.sequences: must be divisible by batch.group = 8 and by batch.updates x parallel.data = 4 x 1 = 4 "
            "(got 60); 56 or 64 would do",
        ),
        (
            "batch.updates=3",
            "batch.sequences: must be divisible by batch.group = 8 and by batch.updates x parallel.data = 3 x 1 = 3 "
            "(got 64); 48 or 72 would do",
        ),
        (
            "parallel.data=32",
            "batch.sequences: must be divisible by batch.group = 8 and by batch.updates x parallel.data = 4 x 32 = 128 "
            "(got 64); 128 would do",
        ),
        (
            "parallel.data=2 warmup.steps=3 warmup.sequences=7",
            "warmup.sequences: must be divisible by parallel.data = 2 (got 7); 6 or 8 would do",
        ),
        (
            "batch.micro_batch_tokens=16",
            "batch.micro_batch_tokens: must exceed rollout.max_new_tokens = 16, to leave room for a prompt (got 16)",
        ),
        (
            "rollout.cache_tokens=10",
            "rollout.cache_tokens: must exceed rollout.max_new_tokens = 16, to leave room for a prompt (got 10)",
        ),
        (
            "rollout.max_new_tokens=512",
            "rollout.max_new_tokens: must be less than the model's 512 positions, to leave room for a prompt (got 512)",
        ),
        (
            "parallel.tensor=4",
            "parallel.tensor: must divide the model's heads = 4, kv_heads = 2 and ffn = 192 (got 4); 1 or 2 would do",
        ),
        (
            "parallel.tensor=2 model.ffn=33",
            "parallel.tensor: must divide the model's heads = 4, kv_heads = 2 and ffn = 33 (got 2); 1 would do",
        ),
        (
            "parallel.pipeline=3 model.layers=4",
            "parallel.pipeline: must divide the model's layers = 4 (got 3); 1, 2 or 4 would do",
        ),
        ("model.heads=3", "model: its 3 heads must be divisible by its 2 kv_heads"),
        ("optimizer.min_lr=1e-3", "optimizer.min_lr: must not exceed optimizer.lr = 1e-06 (got 0.001)"),
        (
            "optimizer.warmup_steps=40",
            "optimizer.warmup_steps: must be less than the stage's optimizer steps = 40 (got 40)",
        ),
        (
            "optimizer.warmup_steps=9 optimizer.decay_steps=5",
            "optimizer.warmup_steps: must be less than decay_steps = 5 (got 9)",
        ),
        (
            "warmup.steps=3 warmup.optimizer.warmup_steps=3",
            "warmup.optimizer.warmup_steps: must be less than the stage's optimizer steps = 3 (got 3)",
        ),
        (
            "objective.delta=0.1 objective.delta_high=0.2",
            "objective.delta: sets both sides, so it cannot stand together with delta_low or delta_high",
        ),
        ("objective.divergence=alpha", "objective.alpha: required for the divergence 'alpha'"),
        ("objective.alpha=0.5", "objective.alpha: used by the divergence 'alpha' alone, but this run's is 'kl_fwd'"),
        (
            "objective.length=9",
            "objective.length: used by the aggregation 'constant_length' alone, but this run's is 'token_mean'",
        ),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, overrides: str, expected: str) -> None:
    assert problems(configure(tmp_path, *overrides.split())) == [expected]


def test_all_cross_field_problems_come_at_once(tmp_path: Path) -> None:
    config = configure(tmp_path, "batch.sequences=60", "parallel.tensor=3", "objective.alpha=1", "optimizer.min_lr=1")
    assert [line.split(":")[0] for line in problems(config)] == [
        "batch.sequences",
        "optimizer.min_lr",
        "objective.alpha",
        "parallel.tensor",
    ]


def test_a_configuration_made_in_python_has_its_bounds_checked(tmp_path: Path) -> None:
    config = replace(configure(tmp_path), batch=Batch(group=1, updates=0), optimizer=Optimizer(betas=(0.9, 1.0)))
    assert problems(config) == [
        "batch.group: must be >= 2: a group of 1 is its own baseline, so every advantage would be 0 (got 1)",
        "batch.updates: must be >= 1 (got 0)",
        "optimizer.betas: must be two numbers in [0, 1) (got [0.9, 1.0])",
    ]


def test_an_existing_run_folder_is_refused(tmp_path: Path) -> None:
    config = replace(configure(tmp_path), run=str(tmp_path / "run"))
    check_run_folder(config)
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError) as caught:
        check_run_folder(config)
    assert str(caught.value) == f"run folder {config.run} exists already; choose another `run:` or remove it"


def test_the_number_of_processes_must_fit(tmp_path: Path) -> None:
    config = configure(tmp_path, "parallel.tensor=2", "parallel.data=2")
    check_world(config, 4)
    with pytest.raises(ConfigError) as caught:
        check_world(config, 2)
    assert str(caught.value) == (
        "this run needs parallel.tensor x pipeline x data = 4 processes, but 2 were started; "
        "start 4, or change parallel"
    )
    with pytest.raises(ConfigError, match=r"= 1 process, but 2 were started; start 1, or"):
        check_world(configure(tmp_path), 2)


# A Hugging Face folder.

HF_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "rms_norm_eps": 1e-6,
}


def model_folder(folder: Path, tokenizer: object) -> RunConfig:
    """A complete model folder at `folder`/m with this tokenizer.json, and a run that trains it."""
    model = folder / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    (model / "model.safetensors").write_bytes(b"")
    (model / "tokenizer.json").write_text(tokenizer if isinstance(tokenizer, str) else json.dumps(tokenizer))
    (folder / "hf.yaml").write_text(BASE.replace("kind: tiny", f"kind: hf, path: {model}"))
    return load(folder / "hf.yaml")


def bpe(*extra: tuple[str, int]) -> dict[str, object]:
    return {
        "model": {"vocab": {"a": 0, "b": 8}},
        "added_tokens": [{"content": token, "id": place} for token, place in extra],
    }


@pytest.mark.parametrize("tokenizer", [bpe(), bpe(("<end>", 9)), {"model": {"vocab": [["a", 0.0]] * 10}}])
def test_a_complete_folder_passes(tmp_path: Path, tokenizer: object) -> None:
    check(model_folder(tmp_path, tokenizer))


@pytest.mark.parametrize(
    ("tokenizer", "token", "largest"),
    [
        (bpe(("<end>", 10)), "<end>", 10),
        ({"model": {"vocab": {"a": 12, "b": 3}}}, "a", 12),
        ({"model": {"vocab": [[f"t{place}", 0.0] for place in range(11)]}}, "t10", 10),
    ],
)
def test_a_token_id_beyond_the_vocabulary_is_refused(
    tmp_path: Path, tokenizer: object, token: str, largest: int
) -> None:
    assert problems(model_folder(tmp_path, tokenizer)) == [
        f"model.path: the tokenizer's largest token id is {largest} ({token!r}), "
        "but the vocabulary of config.json has 10 rows (vocab_size), ids 0 to 9"
    ]


@pytest.mark.parametrize("tokenizer", ["{", "[]", '{"model": {}}', '{"model": {"vocab": {}}}'])
def test_a_broken_tokenizer_is_refused(tmp_path: Path, tokenizer: str) -> None:
    assert problems(model_folder(tmp_path, tokenizer)) == [
        f"model.path: {tmp_path}/m/tokenizer.json is not a tokenizer with a model.vocab"
    ]


def test_missing_files_are_named(tmp_path: Path) -> None:
    config = model_folder(tmp_path, bpe())
    model = tmp_path / "m"
    (model / "tokenizer.json").unlink()
    (model / "model.safetensors").unlink()
    assert problems(config) == [
        f"model.path: {model} holds no *.safetensors file; other weight formats are not read",
        f"model.path: {model} holds no tokenizer.json; other tokenizer formats are not read",
    ]
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-2.safetensors"}}')
    assert problems(config)[0] == (
        f"model.path: {model} lacks model-2.safetensors, which model.safetensors.index.json names"
    )
    (model / "config.json").unlink()
    assert problems(config) == [
        f"model: {model}/config.json: no such file; model.path must be a Hugging Face model folder"
    ]


# The objective and the derived numbers.


def test_a_preset_alone_resolves_to_itself(tmp_path: Path) -> None:
    for name, preset in PRESETS.items():
        resolved = resolve_objective(configure(tmp_path, f"objective.preset={name}"))
        assert (resolved.cell, resolved.advantage, resolved.aggregation) == (
            preset.cell,
            preset.advantage,
            preset.aggregation,
        )
        assert (resolved.length, resolved.ratio_cap, resolved.dual_clip, resolved.anchor) == (16, None, None, "rollout")


@pytest.mark.parametrize(
    ("overrides", "cell"),
    [
        ("delta=0.1", Cell("kl_fwd", "atomic", 0.1, 0.1)),
        ("delta_low=0.1", Cell("kl_fwd", "atomic", 0.1, 0.025)),
        ("delta_high=0.1", Cell("kl_fwd", "atomic", 0.025, 0.1)),
        ("divergence=tv estimator=binary", Cell("tv", "binary", 0.025, 0.025)),
        ("divergence=alpha alpha=0", Cell("alpha", "atomic", 0.025, 0.025, alpha=0.0)),
        ("preset=ripo_guarded", Cell("chi2_pearson", "atomic", 0.025, 0.025, ratio_guard=(0.5, 10.0))),
        ("preset=ripo ratio_guard=[0.9,2]", Cell("chi2_pearson", "atomic", 0.025, 0.025, ratio_guard=(0.9, 2.0))),
    ],
)
def test_changes_replace_what_the_preset_says(tmp_path: Path, overrides: str, cell: Cell) -> None:
    config = configure(tmp_path, *(f"objective.{override}" for override in overrides.split()))
    check(config)
    assert resolve_objective(config).cell == cell


def test_the_objective_in_words(tmp_path: Path) -> None:
    assert str(resolve_objective(configure(tmp_path, "objective.ratio_cap=4"))) == (
        "kl_fwd x atomic, thresholds 0.025 / 0.025, ratio cap 4, advantage mean, token_mean, anchor rollout"
    )
    everything = [
        "preset=ripo_guarded", "divergence=alpha", "alpha=0.5", "dual_clip=3", "advantage=leave_one_out",
        "aggregation=constant_length", "length=100", "anchor=recomputed",
    ]  # fmt: skip
    config = configure(tmp_path, *(f"objective.{change}" for change in everything))
    assert str(resolve_objective(config)) == (
        "alpha(0.5) x atomic, thresholds 0.025 / 0.025, ratio guard 0.5 to 10, dual clip 3, "
        "advantage leave_one_out, constant_length 100, anchor recomputed"
    )


def architecture(**shape: object) -> Architecture:
    common = {"family": "any", "qk_norm": False, "qkv_bias": False, "norm_eps": 1e-6, "rope_theta": 1e4}
    return Architecture(**{**common, "max_positions": 4096, **shape})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (  # Qwen3-0.6B
            architecture(
                layers=28,
                hidden=1024,
                heads=16,
                kv_heads=8,
                head_dim=128,
                ffn=3072,
                vocab=151_936,
                tied=True,
                qk_norm=True,
            ),
            596_049_920,
        ),
        (  # Qwen2.5-0.5B
            architecture(
                layers=24,
                hidden=896,
                heads=14,
                kv_heads=2,
                head_dim=64,
                ffn=4864,
                vocab=151_936,
                tied=True,
                qkv_bias=True,
            ),
            494_032_768,
        ),
        (  # Llama-3-8B
            architecture(
                layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14_336, vocab=128_256, tied=False
            ),
            8_030_261_248,
        ),
    ],
)
def test_parameters_are_those_of_published_models(shape: Architecture, published: int) -> None:
    assert count_parameters(shape) == published


def test_derived_numbers(tmp_path: Path) -> None:
    config = configure(tmp_path, "parallel.data=2", "batch.micro_batch_tokens=60", "warmup.steps=5")
    derived = derive(config)
    assert (derived.prompts, derived.sequences, derived.update_sequences, derived.rank_sequences) == (8, 64, 16, 8)
    assert derived.full_micro_batches == 3  # 8 sequences of at least 17 tokens, 3 of them in 60
    assert (derived.sampled_tokens, derived.optimizer_steps, derived.processes) == (1024, 40, 2)
    assert describe(config).split("\n") == [
        f"model      qwen3, {derived.parameters:,} parameters, 2 layers, vocabulary 21",
        "processes  2 = tensor 1 x pipeline 1 x data 2, cpu, float32",
        "rollout    64 sequences a step = 8 prompts x 8, at most 1,024 sampled tokens",
        "update     4 optimizer steps a rollout, each on 16 sequences, 8 a data-parallel rank",
        "           micro-batches of at most 60 tokens: at least 3 a rank when all responses have full length",
        "in all     10 rollouts, 40 optimizer steps, after 5 supervised ones on 64 sequences each",
        "objective  gppo: kl_fwd x atomic, thresholds 0.025 / 0.025, advantage mean, token_mean, anchor rollout",
    ]
