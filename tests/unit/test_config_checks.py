"""Cross-field checks in exact words, the resolved objective, and the derived numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from gppo_megatron.build_objective import objective_of
from gppo_megatron.config.architecture import Architecture, Experts
from gppo_megatron.config.checks import check, check_run_folder, check_world
from gppo_megatron.config.derived import count_parameters, derive, describe, resolve_objective
from gppo_megatron.config.load import load
from gppo_megatron.config.rollouts import SglangRollout, VllmRollout
from gppo_megatron.config.schema import Batch, Optimizer, RunConfig, TruncatedSampling
from gppo_megatron.errors import ConfigError
from gppo_megatron.objective import auxiliary
from gppo_megatron.objective import corrections as corrections_module
from gppo_megatron.objective.penalties import PenalizedGradient
from gppo_megatron.objective.policy_gradient import PolicyGradient
from gppo_megatron.objective.presets import PRESETS, Cell
from gppo_megatron.objective.sequence import GeometricMean, SequenceRatio
from gppo_megatron.objective.trust_region import TrustRegion

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
        ("parallel.pipeline=2", "parallel.virtual_stages=2", "model.layers=4", "parallel.context=2"),
        ("parallel.tensor=2", "parallel.sequence=true", "memory.recompute=full", "memory.recompute_layers=2"),
        (
            "memory.distributed_optimizer=true",
            "parallel.overlap_gradients=true",
            "parallel.overlap_parameters=true",
            "batch.arrangement=padded",
        ),
        ("warmup.steps=5", "warmup.optimizer.warmup_steps=4", "optimizer.warmup_steps=39"),
        ("model.experts=6", "parallel.expert=2", "parallel.data=4"),
        ("parallel.tensor=4",),
        ("objective.preset=dr_grpo", "objective.length=100"),
        ("objective.divergence=alpha", "objective.alpha=0.5", "objective.delta_low=0.1"),
        (
            "objective.anchor=recomputed",
            "objective.corrections=[{kind: tis}, {kind: reject, limit: 0.1}, {kind: opsm, limit: 0.2}]",
            "objective.auxiliary=[{kind: kl, coefficient: 0.001}, {kind: entropy, coefficient: 0.01}]",
            "objective.reference=.",
        ),
        ("objective.corrections=[{kind: opsm, limit: 0.2}]",),
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
            "parallel.tensor=8",
            "parallel.tensor: must divide the model's heads = 4 and ffn = 192, and divide its kv_heads = 2 or be a "
            "multiple of them (got 8); 1, 2 or 4 would do",
        ),
        (
            "parallel.tensor=2 model.heads=6 model.kv_heads=3",
            "parallel.tensor: must divide the model's heads = 6 and ffn = 192, and divide its kv_heads = 3 or be a "
            "multiple of them (got 2); 1, 3 or 6 would do",
        ),
        (
            "parallel.tensor=2 model.ffn=33",
            "parallel.tensor: must divide the model's heads = 4 and ffn = 33, and divide its kv_heads = 2 or be a "
            "multiple of them (got 2); 1 would do",
        ),
        (
            "parallel.pipeline=3 model.layers=4",
            "parallel.pipeline: must divide the model's layers = 4 (got 3); 1, 2 or 4 would do",
        ),
        (
            "parallel.virtual_stages=2",
            "parallel.virtual_stages: needs parallel.pipeline > 1, there is no pipeline to interleave (got 2); "
            "1 would do",
        ),
        (
            "parallel.virtual_stages=3 parallel.pipeline=2 model.layers=8",
            "parallel.virtual_stages: must divide the 4 layers of a pipeline process, the model's 8 over "
            "parallel.pipeline = 2 (got 3); 1, 2 or 4 would do",
        ),
        (
            "parallel.virtual_stages=2 parallel.pipeline=2 model.layers=4 batch.arrangement=padded",
            "parallel.virtual_stages: needs micro-batches of one shape, batch.arrangement: packed; 1 would do",
        ),
        (
            "parallel.sequence=true",
            "parallel.sequence: needs parallel.tensor > 1, whose processes share the sequence; false would do",
        ),
        (
            "parallel.overlap_parameters=true parallel.overlap_gradients=true",
            "parallel.overlap_parameters: needs memory.distributed_optimizer: true, without it no parameter is "
            "gathered",
        ),
        (
            "parallel.overlap_parameters=true memory.distributed_optimizer=true",
            "parallel.overlap_parameters: needs parallel.overlap_gradients: true, Megatron-Core overlaps both or "
            "gradients alone",
        ),
        (
            "memory.recompute=full memory.recompute_layers=3",
            "memory.recompute_layers: must not exceed the layers of one part of the model, 2 (got 3); 1 or 2 would do",
        ),
        (
            "parallel.context=3 parallel.tensor=2 parallel.sequence=true batch.micro_batch_tokens=100",
            "batch.micro_batch_tokens: must be divisible by 12, as parallel.context and parallel.sequence cut "
            "micro-batches (got 100); 96 or 108 would do",
        ),
        ("parallel.expert=2", "parallel.expert: the model has no experts (got 2); 1 would do"),
        ("parallel.expert_tensor=2", "parallel.expert_tensor: the model has no experts (got 2); 1 would do"),
        (
            "model.experts=6 parallel.expert=4 parallel.data=4",
            "parallel.expert: must divide the model's 6 experts (got 4); 1, 2, 3 or 6 would do",
        ),
        (
            "model.experts=6 parallel.expert_tensor=2 parallel.data=2",
            "parallel.expert_tensor: must equal parallel.tensor = 1 where parallel.expert is 1 (got 2); 1 would do, "
            "or parallel.expert > 1",
        ),
        (
            "model.experts=6 parallel.tensor=2 parallel.sequence=true",
            "parallel.expert_tensor: must equal parallel.tensor = 2 where parallel.expert is 1 (got 1); 2 would do, "
            "or parallel.expert > 1",
        ),
        (
            "model.experts=6 parallel.expert=2 parallel.expert_tensor=2 parallel.data=2",
            "parallel.expert: times parallel.expert_tensor must divide parallel.tensor x data x context = 2 "
            "(got 2 x 2); products of 1 or 2 would do",
        ),
        (
            "model.experts=6 model.expert_ffn=9 parallel.expert=2 parallel.expert_tensor=2 parallel.data=4",
            "parallel.expert_tensor: must divide the experts' ffn = 9 (got 2); 1, 3 or 9 would do",
        ),
        (
            "model.experts=6 parallel.tensor=2 parallel.expert=2",
            "parallel.sequence: a model with experts needs it where parallel.tensor exceeds 1; true would do",
        ),
        (
            "model.experts=2 model.experts_per_token=3",
            "model: model: num_experts_per_tok is 3, but there are 2 experts",
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
            "objective.topk=9",
            "objective.topk: used by the estimator 'topk' alone, but this run's is 'atomic'; "
            "remove it, or set objective.estimator: topk",
        ),
        (
            "diagnostics.exact_sample=8 objective.preset=gppo_exact",
            "diagnostics.exact_sample: the objective's estimator 'exact' works the divergence of every token out; "
            "set it to 0 (got 8)",
        ),
        (
            "diagnostics.exact_sample=8 objective.preset=drpo",
            "diagnostics.exact_sample: compares which tokens a trust region masks one by one, but the surrogate is "
            "'penalty'; set it to 0, or set objective.surrogate: mask (got 8)",
        ),
        (
            "diagnostics.exact_sample=8 diagnostics.estimators=[]",
            "diagnostics.exact_sample: compares diagnostics.estimators with the exact divergence, but there are none; "
            "set it to 0, or name some (got 8)",
        ),
        (
            "objective.length=9",
            "objective.length: used by the aggregation 'constant_length' alone, but this run's is 'token_mean'",
        ),
        (
            "objective.surrogate=sequence_mask",
            "objective.estimator: must be mc with the surrogate 'sequence_mask' (got 'atomic')",
        ),
        (
            "objective.surrogate=penalty objective.estimator=binary",
            "objective.estimator: must be mc or atomic with the surrogate 'penalty' (got 'binary')",
        ),
        (
            "objective.preset=cispo objective.surrogate=penalty",
            "objective.ratio_cap: means nothing with the surrogate 'penalty' (got 5.0)",
        ),
        (
            "prefetch.max_lag=1",
            "prefetch.max_lag: needs rollout servers, but rollout.kind is 'embedded', which samples in the trainer's "
            "own processes; choose another kind, or leave it at 0 (got 1)",
        ),
        (
            "prefetch.over_sampling=3",
            "prefetch.over_sampling: needs rollout servers, but rollout.kind is 'embedded', which samples in the "
            "trainer's own processes; choose another kind, or leave it at 0 (got 3)",
        ),
        (
            "filtering.overlong.kind=penalty filtering.overlong.buffer=16",
            "filtering.overlong.buffer: must be less than rollout.max_new_tokens = 16, below which it lies (got 16)",
        ),
        (
            "filtering.extra_prompts=4",
            "filtering.extra_prompts: takes the place of filtered groups, but filtering.filters is empty; add a "
            "filter such as {kind: no_signal}, or leave it at 0 (got 4)",
        ),
        (
            "objective.preset=gmpo objective.dual_clip=3",
            "objective.dual_clip: means nothing with the surrogate 'geometric_mean' (got 3.0)",
        ),
        (
            "objective.preset=ripo_guarded objective.surrogate=geometric_mean objective.estimator=mc",
            "objective.ratio_guard: means nothing with the surrogate 'geometric_mean' (got [0.5, 10.0])",
        ),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, overrides: str, expected: str) -> None:
    assert problems(configure(tmp_path, *overrides.split())) == [expected]


@pytest.mark.parametrize("correction", ["{kind: tis}", "{kind: mis}", "{kind: reject, limit: 1}"])
def test_a_correction_that_could_mean_nothing_is_refused(tmp_path: Path, correction: str) -> None:
    kind = correction.split(": ")[1].rstrip("}").split(",")[0]
    assert problems(configure(tmp_path, f"objective.corrections=[{correction}]")) == [
        f"objective.corrections[0]: {kind!r} compares the anchor with the sampler, which are the same with "
        "objective.anchor: rollout; set it to recomputed, or leave the correction out"
    ]


def test_filters_that_cannot_work_are_said(tmp_path: Path) -> None:
    filters = "[{kind: no_signal}, {kind: score, low: 0.5, high: 0.25}, {kind: no_signal}]"
    assert problems(configure(tmp_path, f"filtering.filters={filters}")) == [
        "filtering.filters[1].low: must not exceed high = 0.25 (got 0.5)",
        "filtering.filters[2].kind: 'no_signal' is there already; each kind may stand once",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("objective.corrections=[{kind: tis}]", "objective.anchor=recomputed"), None),
        ((), None),
        (
            ("objective.anchor=recomputed", "objective.corrections=[{kind: reject, limit: 0.1}]"),
            "prefetch.max_lag: with objective.anchor: recomputed the ratio leaves out that older weights sampled the "
            "tokens; add {kind: tis} or {kind: mis} to objective.corrections, or set objective.anchor: rollout (got 2)",
        ),
        (
            ("objective.preset=gppo_exact",),
            "prefetch.max_lag: the estimator 'exact' needs the distributions of the weights that sampled, which the "
            "trainer no longer has; set objective.anchor: recomputed with a correction, or max_lag: 0 (got 2)",
        ),
        (
            ("diagnostics.exact_sample=8",),
            "prefetch.max_lag: diagnostics.exact_sample needs the distributions of the weights that sampled, which the "
            "trainer no longer has; set diagnostics.exact_sample: 0, objective.anchor: recomputed, or max_lag: 0 "
            "(got 2)",
        ),
    ],
)
def test_what_older_weights_sampled_is_trained_on_with_their_ratio(
    tmp_path: Path, overrides: tuple[str, ...], expected: str | None
) -> None:
    servers = "rollout.kind=sglang", "rollout.urls=[http://a]", "rollout.context=64"
    config = configure(tmp_path, *servers, "prefetch.max_lag=2", *overrides)
    if expected is None:
        check(config)
    else:
        assert problems(config) == [expected]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "objective.auxiliary=[{kind: entropy, coefficient: 1}, {kind: entropy, coefficient: 2}]",
            "objective.auxiliary[1].kind: 'entropy' is there already; each kind may stand once",
        ),
        (
            "objective.reference=runs/old",
            "objective.reference: used by a term of the kind 'kl' in objective.auxiliary alone, but there is none",
        ),
    ],
)
def test_terms_that_cannot_work_are_said(tmp_path: Path, override: str, expected: str) -> None:
    assert problems(configure(tmp_path, override)) == [expected]


def test_a_reference_must_be_there(tmp_path: Path) -> None:
    config = configure(tmp_path, "objective.auxiliary=[{kind: kl, coefficient: 1}]", "objective.reference=runs/none")
    assert problems(config) == ["objective.reference: no such folder (got 'runs/none')"]


def test_bounds_hold_inside_lists_too(tmp_path: Path) -> None:
    config = configure(tmp_path, "objective.anchor=recomputed", "objective.corrections=[{kind: tis}]")
    broken = replace(config, objective=replace(config.objective, corrections=(TruncatedSampling(cap=-1.0),)))
    assert problems(broken) == ["objective.corrections[0].cap: must be > 0 (got -1.0)"]


def test_all_parts_of_an_objective_are_composed(tmp_path: Path) -> None:
    corrections = (
        "[{kind: tis, cap: 3}, {kind: mis, level: sequence}, {kind: reject, limit: 1}, {kind: opsm, limit: 2}]"
    )
    terms = "[{kind: kl, coefficient: 0.25, estimator: k3}, {kind: entropy, coefficient: 0.5}]"
    config = configure(
        tmp_path, "objective.anchor=recomputed", f"objective.corrections={corrections}", f"objective.auxiliary={terms}"
    )
    resolved = resolve_objective(config)
    surrogate = PolicyGradient(TrustRegion(PRESETS["gppo"].cell))
    correctors = (
        corrections_module.TruncatedSampling("token", 3.0),
        corrections_module.MaskedSampling("sequence", 0.5, 5.0),
        corrections_module.SequenceRejection("mean", 1.0),
        corrections_module.OffPolicyRejection(2.0),
    )
    added = (auxiliary.ReferenceKl(0.25, "k3"), auxiliary.EntropyBonus(0.5))
    assert objective_of(resolved) == auxiliary.WithTerms(corrections_module.Corrected(surrogate, correctors), added)
    assert str(resolved).endswith("tis token 3, mis sequence 0.5 5, reject 1 mean, opsm 2, kl 0.25 k3, entropy 0.5")


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
    assert str(caught.value) == (
        f"run folder {config.run} exists already; choose another `run:`, remove it, or go on with that run: --resume"
    )
    check_run_folder(config, resume=True)


def test_the_number_of_processes_must_fit(tmp_path: Path) -> None:
    config = configure(tmp_path, "parallel.tensor=2", "parallel.data=2")
    check_world(config, 4)
    with pytest.raises(ConfigError) as caught:
        check_world(config, 2)
    assert str(caught.value) == (
        "this run needs parallel.tensor x pipeline x data x context = 4 processes, but 2 were started; "
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
    "head_dim": 8,
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
        values = (resolved.cell, resolved.advantage, resolved.aggregation, resolved.surrogate, resolved.ratio_cap)
        assert values == (preset.cell, preset.advantage, preset.aggregation, preset.surrogate, preset.ratio_cap)
        assert (resolved.length, resolved.dual_clip, resolved.anchor) == (16, None, "rollout")


def test_every_preset_passes_its_checks_and_has_a_loss(tmp_path: Path) -> None:
    kinds = {}
    for name in PRESETS:
        config = configure(tmp_path, f"objective.preset={name}")
        check(config)
        kinds[name] = type(objective_of(resolve_objective(config)))
    assert kinds == {
        **dict.fromkeys(PRESETS, PolicyGradient),
        "gspo": SequenceRatio,
        "gmpo": GeometricMean,
        **dict.fromkeys(("spo", "drpo"), PenalizedGradient),
    }


@pytest.mark.parametrize(
    ("overrides", "cell"),
    [
        ("delta=0.1", Cell("kl_fwd", "atomic", 0.1, 0.1)),
        ("delta_low=0.1", Cell("kl_fwd", "atomic", 0.1, 0.025)),
        ("delta_high=0.1", Cell("kl_fwd", "atomic", 0.025, 0.1)),
        ("divergence=tv estimator=binary", Cell("tv", "binary", 0.025, 0.025)),
        ("divergence=alpha alpha=0", Cell("alpha", "atomic", 0.025, 0.025, alpha=0.0)),
        ("preset=ripo_guarded", Cell("chi2_pearson", "atomic", 0.025, 0.025, ratio_guard=(0.5, 10.0))),
        ("surrogate=penalty", Cell("kl_fwd", "atomic", 0.025, 0.025)),
        (
            "surrogate=sequence_mask estimator=mc ratio_guard=[0.9,2]",
            Cell("kl_fwd", "mc", 0.025, 0.025, None, (0.9, 2)),
        ),
        ("preset=gspo delta=0.01 surrogate=mask", Cell("tv", "mc", 0.01, 0.01)),
        ("preset=ripo ratio_guard=[0.9,2]", Cell("chi2_pearson", "atomic", 0.025, 0.025, ratio_guard=(0.9, 2.0))),
    ],
)
def test_changes_replace_what_the_preset_says(tmp_path: Path, overrides: str, cell: Cell) -> None:
    config = configure(tmp_path, *(f"objective.{override}" for override in overrides.split()))
    check(config)
    assert resolve_objective(config).cell == cell


def test_what_cannot_replay_is_refused(tmp_path: Path) -> None:
    config = configure(tmp_path, "objective.routing=replayed", "model.experts=4")
    check(config)
    assert "anchor rollout, routing replayed" in str(resolve_objective(config))
    check(replace(config, rollout=SglangRollout(max_new_tokens=16, urls=("http://a:1",), context=64)))
    servers = VllmRollout(max_new_tokens=16, urls=("http://a:1",), context=64)
    assert problems(replace(config, rollout=servers)) == [
        "objective.routing: 'replayed' needs the experts that the sampler sent each token to, which rollout.kind = "
        "'vllm' does not report; set objective.routing: own, or rollout.kind: embedded or sglang"
    ]
    assert problems(configure(tmp_path, "objective.routing=replayed")) == [
        "objective.routing: the model has no experts to send tokens to (got 'replayed'); own would do"
    ]


def test_servers_report_top_tokens(tmp_path: Path) -> None:
    config = configure(tmp_path, "objective.preset=gppo_topk")
    for servers in (SglangRollout, VllmRollout):
        check(replace(config, rollout=servers(max_new_tokens=16, urls=("http://a:1",), context=64)))


@pytest.mark.parametrize("sync", ["distributed", "tensor"])
def test_vllm_takes_weights_through_a_folder_alone(tmp_path: Path, sync: Literal["distributed", "tensor"]) -> None:
    servers = VllmRollout(max_new_tokens=16, urls=("http://a:1",), context=64)
    check(replace(configure(tmp_path), rollout=servers))
    assert problems(replace(configure(tmp_path), rollout=replace(servers, sync=sync))) == [
        "rollout.sync: must be disk: vLLM's broadcast of weights is not built in here, and on a CPU it has none; "
        f"or use kind: sglang (got {sync!r})"
    ]


@pytest.mark.parametrize(
    ("overrides", "topk"),
    [("preset=gppo_topk", 20), ("preset=gppo_topk topk=7", 7), ("preset=gppo_exact", 0), ("estimator=topk topk=3", 3)],
)
def test_how_many_top_tokens_are_read(tmp_path: Path, overrides: str, topk: int) -> None:
    config = configure(tmp_path, *(f"objective.{override}" for override in overrides.split()))
    check(config)
    resolved = resolve_objective(config)
    assert resolved.topk == resolved.sampled_top_tokens == topk
    assert replace(resolved, anchor="recomputed").sampled_top_tokens == 0
    assert (f"x topk of {topk} tokens, thresholds" in str(resolved)) == (topk > 0)


def test_the_objective_in_words(tmp_path: Path) -> None:
    assert str(resolve_objective(configure(tmp_path, "objective.ratio_cap=4"))) == (
        "kl_fwd x atomic, thresholds 0.025 / 0.025, ratio cap 4, advantage mean, token_mean, anchor rollout"
    )
    assert str(resolve_objective(configure(tmp_path, "objective.preset=cispo"))) == (
        "tv x mc, no threshold, ratio cap 5, advantage mean_std, token_mean, anchor rollout"
    )
    assert str(resolve_objective(configure(tmp_path, "objective.preset=gspo"))).startswith(
        "tv x mc as sequence_mask, thresholds 0.00015 / 0.0002, "
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
        (  # Qwen3-30B-A3B
            architecture(
                layers=48,
                hidden=2048,
                heads=32,
                kv_heads=4,
                head_dim=128,
                ffn=6144,
                vocab=151_936,
                tied=False,
                qk_norm=True,
                experts=Experts(128, 8, 768, True, frozenset()),
            ),
            30_532_122_624,
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
        "processes  2 = tensor 1 x pipeline 1 x data 2 x context 1, cpu, float32",
        "rollout    64 sequences a step = 8 prompts x 8, at most 1,024 sampled tokens",
        "update     4 optimizer steps a rollout, each on 16 sequences, 8 a data-parallel rank",
        "           micro-batches of at most 60 tokens: at least 3 a rank when all responses have full length",
        "in all     10 rollouts, 40 optimizer steps, after 5 supervised ones on 64 sequences each",
        "objective  gppo: kl_fwd x atomic, thresholds 0.025 / 0.025, advantage mean, token_mean, anchor rollout",
    ]
