"""YAML and overrides -> RunConfig: every problem at once, in exact words; and back to YAML without loss."""

from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gppo_megatron.config import schema
from gppo_megatron.config.bounds import BOUNDS
from gppo_megatron.config.load import dump, load
from gppo_megatron.config.yaml_text import parse, parse_scalar, render
from gppo_megatron.errors import ConfigError
from gppo_megatron.objective.presets import DIVERGENCES, ESTIMATORS, PRESETS, TOKEN_ESTIMATORS, Surrogate

GOOD = """\
run: runs/x
steps: 5
model: {kind: tiny}
data: {kind: reasoning_gym, task: chain_sum}
rollout: {max_new_tokens: 16}
"""


def write(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """The error's lines, without the folder of the file and the indentation."""
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), overrides)
    assert caught.value.exit_code == 2
    return [line.strip() for line in str(caught.value).replace(f"{folder}/", "").split("\n")]


def test_the_smallest_run_takes_every_default(tmp_path: Path) -> None:
    assert load(write(tmp_path, GOOD)) == schema.RunConfig(
        run="runs/x",
        steps=5,
        model=schema.TinyModel(),
        data=schema.ReasoningGymData(task="chain_sum"),
        rollout=schema.EmbeddedRollout(max_new_tokens=16),
    )


def test_values_of_every_type(tmp_path: Path) -> None:
    text = GOOD.replace("{kind: tiny}", "{kind: hf, path: models/q}") + (
        "optimizer: {lr: 1e-6, betas: [0, 0.99], weight_decay: 1, decay_steps: 10_000}\n"
        "warmup: {steps: 3, optimizer: {lr: 2E-3}}\n"
        "objective: {ratio_guard: [0.5, 10], delta: .1}\n"
        "megatron: {recompute: {modules: [a, 1, null]}}\n"
    )
    config = load(write(tmp_path, text))
    assert config.model == schema.HfModel(path="models/q")
    assert config.optimizer == schema.Optimizer(lr=1e-6, betas=(0.0, 0.99), weight_decay=1.0, decay_steps=10_000)
    assert isinstance(config.optimizer.weight_decay, float)
    assert config.warmup == schema.Warmup(steps=3, optimizer=schema.Optimizer(lr=2e-3))
    assert config.objective == schema.Objective(ratio_guard=(0.5, 10.0), delta=0.1)
    assert config.megatron == {"recompute": {"modules": ["a", 1, None]}}


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    text = """\
run: runs/x
stesp: 3
model: {kind: tiny, hiden: 3}
data: {kind: reasoning_gym, task: 7}
rollout: {max_new_tokens: 16, temperature: 0}
batch: {sequences: '8', group: 1}
objective: {preset: gppo2, delta: -0.1, divergence: 5, ratio_guard: [0.5], anchor: sampler}
optimizer: {lr: 1e-6, betas: [0.9, 1], eps: true, clip_grad: .inf}
warmup: {steps: 2.0}
evaluation: 20
group: 3
zzz: null
"""
    assert problems(tmp_path, text) == [
        "run.yaml: 19 problems",
        "steps: required, but not set",
        "model.hiden: no such key; did you mean 'hidden'?",
        "data.task: must be text (got 7)",
        "rollout.temperature: must be > 0: at temperature 0 a sampled token has no log-probability to train on, "
        "greedy is not a training mode (got 0.0)",
        "batch.sequences: must be an integer (got '8')",
        "batch.group: must be >= 2: a group of 1 is its own baseline, so every advantage would be 0 (got 1)",
        f"objective.preset: must be one of {', '.join(PRESETS)} (got 'gppo2'); did you mean 'gppo'?",
        "objective.divergence: must be text or null (got 5)",
        "objective.delta: must be > 0 (got -0.1)",
        "objective.ratio_guard: must be a list of 2 numbers or null (got [0.5])",
        "objective.anchor: must be one of 'rollout', 'recomputed' (got 'sampler')",
        "optimizer.betas: must be two numbers in [0, 1) (got [0.9, 1.0])",
        "optimizer.eps: must be a number (got true)",
        "optimizer.clip_grad: must be finite (got inf)",
        "warmup.steps: must be an integer (got 2.0)",
        "evaluation: must be a mapping (got 20)",
        "stesp: no such key; did you mean 'steps'?",
        "group: no such key; did you mean 'batch.group'?",
        "zzz: no such key",
    ]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("{}", "model.kind: required, but not set; one of 'tiny', 'hf'"),
        ("{kind: tinyy}", "model.kind: must be one of 'tiny', 'hf' (got 'tinyy'); did you mean 'tiny'?"),
        ("{kind: [hf]}", "model.kind: must be one of 'tiny', 'hf' (got ['hf'])"),
        ("{kind: hf}", "model.path: required, but not set"),
        ("{kind: hf, path: a, hidden: 8}", "model.hidden: no such key of this kind of model"),
        ("null", "model: must be a mapping (got null)"),
        ("{kind: tiny, tied: yes}", "model.tied: must be true or false (got 'yes')"),
        ("{kind: tiny, alphabet: abca}", "model.alphabet: must be at least one character, each only once (got 'abca')"),
        ("{kind: tiny, head_dim: 7}", "model.head_dim: must be even and >= 2 (got 7)"),
    ],
)
def test_the_model_is_chosen_by_kind(tmp_path: Path, model: str, problem: str) -> None:
    assert problems(tmp_path, GOOD.replace("{kind: tiny}", model)) == ["run.yaml: 1 problem", problem]


def test_a_kind_that_may_be_left_out_is_checked_where_it_is_written(tmp_path: Path) -> None:
    text = GOOD.replace("{max_new_tokens: 16}", "{max_new_tokens: 16, kind: embeded}")
    expected = "rollout.kind: must be one of 'embedded', 'vllm', 'sglang' (got 'embeded'); did you mean 'embedded'?"
    assert problems(tmp_path, text)[1:] == [expected]


@pytest.mark.parametrize(
    ("urls", "fault"),
    [
        ("[]", "(got [])"),
        ("[here:30000]", "(got ['here:30000'])"),
        ("[http://a:1, http://a:1]", "(got ['http://a:1', 'http://a:1'])"),
        ("[http://a:1, http://A:1/]", "(got ['http://a:1', 'http://A:1/'])"),
        ("[http://a:99999]", "(got ['http://a:99999'])"),
    ],
)
def test_the_servers_addresses_are_checked(tmp_path: Path, urls: str, fault: str) -> None:
    text = GOOD.replace("{max_new_tokens: 16}", f"{{max_new_tokens: 16, kind: sglang, context: 64, urls: {urls}}}")
    expected = f"rollout.urls: must be one or more addresses such as http://host:30000, each once {fault}"
    assert problems(tmp_path, text)[1:] == [expected]


@pytest.mark.parametrize("kind", ["embedded", "sglang, urls: [http://a], context: 99"])
@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_cutting_the_distribution_is_refused_with_the_reason(tmp_path: Path, kind: str, key: str) -> None:
    text = GOOD.replace("rollout: {", f"rollout: {{kind: {kind}, {key}: 1, ")
    assert problems(tmp_path, text) == [
        "run.yaml: 1 problem",
        f"rollout.{key}: sampling from a part of the distribution is not for training: the log-probs that come back "
        "would not be those of what was sampled; remove it, and use rollout.temperature (got 1)",
    ]


def test_lists_of_sections_are_chosen_by_kind(tmp_path: Path) -> None:
    text = GOOD + (
        "objective:\n  corrections: [{kind: tis, cap: 3}, {kind: reject, limit: 0.1, statistic: largest}]\n"
        "  auxiliary:\n    - {kind: kl, coefficient: 1e-3, estimator: k3}\n"
        "    - kind: entropy\n      coefficient: 1e-4\n"
    )
    objective = load(write(tmp_path, text)).objective
    assert objective.corrections == (
        schema.TruncatedSampling(cap=3.0),
        schema.SequenceRejection(0.1, "reject", "largest"),
    )
    assert objective.auxiliary == (schema.ReferenceKl(1e-3, "kl", "k3"), schema.EntropyBonus(1e-4))
    replaced = load(write(tmp_path, text), ["objective.corrections=[{kind: mis}]", "objective.auxiliary=[]"]).objective
    assert (replaced.corrections, replaced.auxiliary) == ((schema.MaskedSampling(),), ())


def test_lists_of_values(tmp_path: Path) -> None:
    given = "diagnostics: {estimators: [binary], thresholds: [1, 0.5], masked: false}\n"
    assert load(write(tmp_path, GOOD + given)).diagnostics == schema.Diagnostics(("binary",), (1.0, 0.5), masked=False)
    wrong = "diagnostics: {estimators: [mc, mc], thresholds: ['1'], bound: 1}\n"
    assert problems(tmp_path, GOOD + wrong)[1:] == [
        f"diagnostics.estimators: must be different ones of {', '.join(TOKEN_ESTIMATORS)} (got ['mc', 'mc'])",
        "diagnostics.thresholds: must be a list of numbers (got ['1'])",
        "diagnostics.bound: must be true or false (got 1)",
    ]
    assert problems(tmp_path, GOOD + "diagnostics: {estimators: mc, thresholds: [0.1, -1]}\n")[1:] == [
        "diagnostics.estimators: must be a list of texts (got 'mc')",
        "diagnostics.thresholds: must be different numbers > 0 (got [0.1, -1.0])",
    ]


def test_every_problem_in_a_list_is_listed(tmp_path: Path) -> None:
    text = GOOD + (
        "objective:\n  corrections: [{kind: tiss}, {cap: 2}, 5, {kind: tis, cap: 0, low: 1, caps: 3}, {kind: reject}]\n"
        "  auxiliary: {kind: kl}\n"
    )
    kinds = "'tis', 'mis', 'reject', 'opsm'"
    assert problems(tmp_path, text)[1:] == [
        f"objective.corrections[0].kind: must be one of {kinds} (got 'tiss'); did you mean 'tis'?",
        f"objective.corrections[1].kind: required, but not set; one of {kinds}",
        "objective.corrections[2]: must be a mapping (got 5)",
        "objective.corrections[3].cap: must be > 0 (got 0.0)",
        "objective.corrections[3].low: no such key of this kind of objective.corrections[3]",
        "objective.corrections[3].caps: no such key; did you mean 'cap'?",
        "objective.corrections[4].limit: required, but not set",
        "objective.auxiliary: must be a list of mappings (got {'kind': 'kl'})",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml: empty; a run needs at least the keys run, steps, model, data, rollout"),
        ("# nothing\n", "run.yaml: empty; a run needs at least the keys run, steps, model, data, rollout"),
        ("- a\n- b\n", "run.yaml: must hold `key: value` lines at the top level (got ['a', 'b'])"),
        (
            "a: 1\nb: [1,\n",
            "run.yaml: not valid YAML: line 3, column 1: while parsing a flow node, "
            "expected the node content, but found '<stream end>'",
        ),
        ("a: b: c\n", "run.yaml: not valid YAML: line 1, column 5: mapping values are not allowed here"),
        ("a: 1\nb: 2\na: 3\n", "run.yaml: not valid YAML: line 3, column 1: key 'a' is written twice, first in line 1"),
        ("a: {b: 1, b: 2}", "run.yaml: not valid YAML: line 1, column 11: key 'b' is written twice, first in line 1"),
        ("1: 2\n", "run.yaml: not valid YAML: line 1, column 1: a key must be text; write it in quotes"),
        ("a: &x 1\nb: *x\n", "run.yaml: not valid YAML: line 1, column 4: anchors, aliases and tags are not supported"),
        ("a: !!int x\n", "run.yaml: not valid YAML: line 1, column 4: anchors, aliases and tags are not supported"),
        (
            "a: 1\n---\nb: 1\n",
            "run.yaml: not valid YAML: line 2, column 1: "
            "expected a single document in the stream, but found another document",
        ),
        ("a: \x00", "run.yaml: not valid YAML: character number 4 (#x0000) is not allowed"),
        ("a: " + "[" * 2000, "run.yaml: not valid YAML: nested too deeply"),
    ],
)
def test_a_file_that_is_no_mapping_gives_one_line(tmp_path: Path, text: str, message: str) -> None:
    assert problems(tmp_path, text) == [message]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file$"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)$"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: \xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8 text \(byte 6\)$"):
        load(tmp_path / "latin.yaml")


def test_overrides_change_add_and_create(tmp_path: Path) -> None:
    overrides = [
        "steps=7",
        "optimizer.lr=1e-5",
        "optimizer.betas=[0.8,0.9]",
        "data.prompt={question}=",
        "data.remove=' '",
        "warmup.steps=3",
        "objective.delta=null",
        "rollout={kind: embedded, max_new_tokens: 5}",
        "megatron.some.deep=true",
    ]
    config = load(write(tmp_path, GOOD + "warmup: null\n"), overrides)
    assert (config.steps, config.optimizer.lr, config.optimizer.betas) == (7, 1e-5, (0.8, 0.9))
    assert (config.data.prompt, config.data.remove) == ("{question}=", " ")
    assert config.warmup == schema.Warmup(steps=3)
    assert config.megatron == {"some": {"deep": True}}
    assert config.rollout == schema.EmbeddedRollout(max_new_tokens=5)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("steps", "steps: an override is written key=value"),
        ("=3", "=3: an override is written key=value"),
        ("stesp=3", "stesp: no such key; did you mean 'steps'?"),
        ("optimzer.lr=3", "optimzer: no such key; did you mean 'optimizer'?"),
        ("batch.sequence=8", "batch.sequence: no such key; did you mean 'sequences'?"),
        ("steps.x=3", "steps.x: no such key; steps holds no keys"),
        ("steps='3'", "steps: must be an integer (got '3')"),
        ("steps=", "steps: must be an integer (got null)"),
        ("seed=9223372036854775808", "seed: must be >= 0 and < 2**63 (got 9223372036854775808)"),
        ("optimizer.betas=[1", "optimizer.betas: not valid YAML: line 1, column 3: while parsing a flow sequence, "
         "expected ',' or ']', but got '<stream end>' (got '[1')"),
    ],
)  # fmt: skip
def test_overrides_that_cannot_work(tmp_path: Path, override: str, problem: str) -> None:
    assert problems(tmp_path, GOOD, override) == ["run.yaml: 1 problem", problem]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E3", 1000.0), ("-.5", -0.5), ("1.", 1.0), ("10_000", 10_000), ("010", 10), ("-3", -3),
        ("yes", "yes"), ("on", "on"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("1_", "1_"), ("e5", "e5"),
        ("true", True), ("null", None), ("~", None), ("", None), (".inf", float("inf")), ("a: b # c", "a: b # c"),
    ],
)  # fmt: skip
def test_scalars_are_read_as_yaml_1_2(text: str, value: object) -> None:
    assert parse_scalar(text) == value
    assert type(parse_scalar(text)) is type(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_rendered_yaml_reads_back_equal(tree: Any) -> None:
    assert parse(render(tree)) == tree


counts = st.integers(1, 10**6)
positive = st.floats(1e-12, 1e6)
text = st.text(min_size=1, max_size=20)
share = st.floats(0, 1, exclude_max=True)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


optimizers = st.builds(
    schema.Optimizer,
    lr=positive,
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    decay_steps=optional(counts),
    betas=st.tuples(share, share),
    clip_grad=positive,
)
tiny_models = st.builds(
    schema.TinyModel,
    alphabet=text.map(lambda letters: "".join(dict.fromkeys(letters))),
    hidden=counts,
    head_dim=counts.map(lambda count: 2 * count),
    tied=st.booleans(),
)
data_sources = st.builds(
    schema.ReasoningGymData,
    task=text,
    options=st.dictionaries(st.text(), json_values, max_size=2),
    prompt=text,
    remove=st.text(),
    chat=st.booleans(),
)
file_sources = st.builds(
    schema.FileData,
    path=text,
    adapter=st.sampled_from(get_args(schema.AdapterName)),
    columns=st.dictionaries(st.sampled_from(["prompt", "answer"]), text),
    template=st.sampled_from(get_args(schema.TemplateName)),
    max_prompt_tokens=counts,
    evaluation=optional(text),
    evaluation_adapter=optional(st.sampled_from(get_args(schema.AdapterName))),
    strict=st.booleans(),
)
objectives = st.builds(
    schema.Objective,
    preset=st.sampled_from(sorted(PRESETS)),
    divergence=optional(st.sampled_from(DIVERGENCES)),
    alpha=optional(st.floats(-2, 2)),
    surrogate=optional(st.sampled_from(get_args(Surrogate))),
    estimator=optional(st.sampled_from(ESTIMATORS)),
    delta_low=optional(positive),
    ratio_guard=optional(st.tuples(st.floats(0.1, 0.9), st.floats(1.1, 9))),
    advantage=optional(st.sampled_from(["mean", "mean_std", "leave_one_out"])),
    corrections=st.lists(
        st.builds(schema.TruncatedSampling, level=st.sampled_from(["token", "sequence"]), cap=positive)
        | st.builds(schema.MaskedSampling)
        | st.builds(schema.SequenceRejection, limit=positive, statistic=st.sampled_from(["mean", "largest"]))
        | st.builds(schema.OffPolicyRejection, limit=positive)
    ).map(tuple),
    auxiliary=st.lists(
        st.builds(schema.ReferenceKl, coefficient=positive) | st.builds(schema.EntropyBonus, coefficient=positive)
    ).map(tuple),
    reference=optional(text),
)
diagnostics = st.builds(
    schema.Diagnostics,
    estimators=st.lists(st.sampled_from(TOKEN_ESTIMATORS), unique=True).map(tuple),
    thresholds=st.lists(positive, unique=True).map(tuple),
    masked=st.booleans(),
    exact_sample=st.integers(0, 99),
)
filtering = st.builds(
    schema.Filtering,
    overlong=optional(st.builds(schema.Mask) | st.builds(schema.SoftPenalty, buffer=counts, weight=positive)),
    filters=st.lists(
        st.builds(schema.NoSignal) | st.builds(schema.MeanScore) | st.builds(schema.Unfinished, share=share)
    ).map(tuple),
)
configs = st.builds(
    schema.RunConfig,
    run=text,
    steps=counts,
    model=tiny_models | st.builds(schema.HfModel, path=text),
    data=data_sources | file_sources,
    rollout=st.builds(schema.EmbeddedRollout, max_new_tokens=counts, temperature=positive),
    device=st.sampled_from(["cpu", "cuda"]),
    filtering=filtering,
    prefetch=st.builds(schema.Prefetch, max_lag=counts),
    objective=objectives,
    diagnostics=diagnostics,
    optimizer=optimizers,
    warmup=optional(st.builds(schema.Warmup, steps=counts, optimizer=optimizers)),
    megatron=st.dictionaries(st.text(), json_values, max_size=2),
)


@given(config=configs)
@settings(max_examples=60, deadline=None)
def test_a_dumped_configuration_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, config: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "round.yaml"
    file.write_bytes(dump(config).encode())
    assert load(file) == config


def subsections(hint: Any) -> list[type]:
    """The dataclasses a key of this type may hold, by itself or in a list."""
    if get_origin(hint) is tuple:
        return [section for member in get_args(hint) for section in subsections(member)]
    members = get_args(hint) or (hint,)
    return [member for member in members if isinstance(member, type) and is_dataclass(member)]


def sections(owner: type) -> list[type]:
    """`owner` and every section below it."""
    return [
        owner,
        *(deep for hint in get_type_hints(owner).values() for sub in subsections(hint) for deep in sections(sub)),
    ]


def documented() -> dict[str, str]:
    """dotted key -> default, as docs/configuration.md lists them."""
    lines = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip(" `") for cell in line.split("|")[1:3]] for line in lines if line.startswith("| `")]
    return dict(cells)


def keys(owner: type, prefix: str = "") -> dict[str, str]:
    """dotted key -> default in YAML, of every value below `owner`; `-` where it is required."""
    found = {}
    for item in fields(owner):
        hint = get_type_hints(owner)[item.name]
        below = subsections(hint)
        for section in below:
            entry = f"[{section.kind}]" if get_origin(hint) is tuple else ""  # type: ignore[attr-defined]
            found |= keys(section, f"{prefix}{item.name}{entry}.")
        if not below:
            required = item.default is MISSING and item.default_factory is MISSING
            default = item.default if item.default is not MISSING else {}
            found[prefix + item.name] = "-" if required else render([default])[2:].strip()
    return found


def test_the_documentation_lists_every_key_and_its_default() -> None:
    expected = {
        key: default
        for key, default in keys(schema.RunConfig).items()
        if not key.startswith("warmup.optimizer.") and not key.endswith(".kind")
    }
    assert documented() == expected


def test_every_number_has_a_bound_and_every_bound_a_key() -> None:
    for owner in sections(schema.RunConfig):
        names = {item.name for item in fields(owner)}
        assert set(BOUNDS.get(owner, {})) <= names
        numbers = {name for name, hint in get_type_hints(owner).items() if {int, float} & {hint, *get_args(hint)}}
        assert numbers - set(BOUNDS.get(owner, {})) <= {"alpha"}, owner
