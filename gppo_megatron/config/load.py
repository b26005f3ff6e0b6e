"""A run's YAML and its `key=value` overrides -> RunConfig, or one error that lists everything wrong with them."""

import builtins
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from gppo_megatron.config.bounds import problem_with
from gppo_megatron.config.problems import config_error, nearest, show
from gppo_megatron.config.rollouts import CUTTING, NEED_NO_KIND, NO_CUT
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.config.yaml_text import parse, parse_scalar, render
from gppo_megatron.errors import ConfigError

STRUCTURED = re.compile(r"[\['\"]|\{\s*kind\s*:")
"""How the value of an override begins that is YAML and no plain scalar."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run. Raises one ConfigError with every unknown key, missing key, wrong type and value out of bounds.

    An override is `dotted.key=value`. The value is a plain YAML scalar; a list or quoted text when it starts with
    `[`, `'` or `"`; a section when it starts with `{kind:`. `optimizer.lr=1e-5`, `optimizer.betas=[0.9,0.99]`,
    `rollout={kind: embedded}`, `data.prompt={question}=`.
    """
    tree = _read(Path(path))
    problems = [problem for override in overrides if (problem := _apply(override, tree))]
    config = _section(RunConfig, tree, "", problems)
    if problems:
        raise config_error(str(path), problems)
    assert isinstance(config, RunConfig)
    return config


def dump(config: RunConfig) -> str:
    """YAML with every key that `load` reads back to an equal configuration."""
    return render(_tree(config))


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start + 1})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if tree is None:
        raise ConfigError(f"{path}: empty; a run needs at least the keys {', '.join(_required(RunConfig))}")
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines at the top level (got {show(tree)})")
    return tree


def _apply(override: str, tree: dict[str, Any]) -> str | None:
    """Put an override into `tree`; the problem when that cannot be done. Types and keys are checked later."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        return f"{override}: an override is written key=value"
    *parents, last = path.split(".")
    section = tree
    for name in parents:
        if section.get(name) is None:
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            return f"{path}: no such key; {name} holds no keys"
    try:
        section[last] = parse(text) if STRUCTURED.match(text) else parse_scalar(text)
    except ValueError as error:
        return f"{path}: not valid YAML: {error} (got {show(text)})"
    return None


def _section(owner: type, tree: Mapping[str, Any], prefix: str, problems: list[str]) -> object:
    """The dataclass `owner` built from `tree`; None once there are problems, which are appended."""
    hints = get_type_hints(owner)
    values = {}
    for name in hints:
        if name in tree:
            values[name] = _value(owner, name, hints[name], tree[name], prefix, problems)
        elif name in _required(owner):
            problems.append(f"{prefix}{name}: required, but not set")
    for name in tree:
        if name in CUTTING and prefix == "rollout.":
            problems.append(f"{prefix}{name}: {NO_CUT} (got {show(tree[name])})")
        elif name not in hints:
            problems.append(f"{prefix}{name}: no such key{nearest(name, hints) or _elsewhere(name, prefix)}")
    return None if problems else owner(**values)


def _value(owner: type, name: str, hint: Any, given: Any, prefix: str, problems: list[str]) -> object:
    where = prefix + name
    if _sections(item := _item(hint)):
        return _list(item, given, where, problems)
    sections = _sections(hint)
    if not sections:
        return _leaf(owner, name, hint, given, where, problems)
    if given is None and NoneType in _members(hint):
        return None
    return _one(sections, given, where, problems)


def _list(item: Any, given: Any, where: str, problems: list[str]) -> object:
    """A list of sections, each of them one of the types of `item`."""
    if not isinstance(given, list):
        problems.append(f"{where}: must be a list of mappings (got {show(given)})")
        return None
    return tuple(_one(_sections(item), entry, f"{where}[{place}]", problems) for place, entry in enumerate(given))


def _one(sections: Sequence[Any], given: Any, where: str, problems: list[str]) -> object:
    """The section that `given` holds; None once there are problems, which are appended."""
    if not isinstance(given, dict):
        problems.append(f"{where}: must be a mapping (got {show(given)})")
        return None
    chosen = sections[0] if len(sections) == 1 else _variant(sections, given, where, problems)
    return None if chosen is None else _section(chosen, given, f"{where}.", problems)


def _variant(sections: Sequence[Any], given: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    """The section whose `kind` is written, or that needs none; None, with a problem, when it is missing or unknown."""
    kinds = {section.kind: section for section in sections}
    choices = ", ".join(map(repr, kinds))
    kind = given.get("kind", next((kind for kind, section in kinds.items() if section in NEED_NO_KIND), None))
    if kind is None:
        problems.append(f"{where}.kind: required, but not set; one of {choices}")
    elif not isinstance(kind, str) or kind not in kinds:
        problems.append(f"{where}.kind: must be one of {choices} (got {show(kind)}){nearest(str(kind), kinds)}")
    return kinds.get(kind) if isinstance(kind, str) else None


def _leaf(owner: type, name: str, hint: Any, given: Any, where: str, problems: list[str]) -> object:
    try:
        # JSON is pydantic's strict reading of data: lists become tuples and 1 a float, but '8' is no integer.
        value: object = TypeAdapter(hint).validate_json(json.dumps(given), strict=True)
    except ValidationError:
        problems.append(f"{where}: must be {_expected(hint)} (got {show(given)})")
        return None
    problem = problem_with(owner, name, value)
    if problem is not None:
        problems.append(f"{where}: {problem}")
    return value


def _expected(hint: Any) -> str:
    """A type in plain words, article included."""
    plain = {int: "an integer", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
    if hint in plain:
        return plain[hint]
    if get_origin(hint) is Literal:
        choices = [repr(choice) for choice in get_args(hint)]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if (item := _item(hint)) is not None:
        return {float: "a list of numbers", str: "a list of texts"}[item]
    if get_origin(hint) is tuple:
        if Ellipsis in get_args(hint):
            return "a list"
        return f"a list of {len(get_args(hint))} numbers"
    if len(_members(hint)) > 1:
        return " or ".join(_expected(member) for member in _members(hint))
    return "a mapping"


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _item(hint: Any) -> Any:
    """What a list of any length is a list of; None for every other type."""
    match get_origin(hint), get_args(hint):
        case builtins.tuple, (item, builtins.Ellipsis):
            return item
    return None


def _sections(hint: Any) -> list[Any]:
    return [member for member in _members(hint) if is_dataclass(member)]


def _required(owner: Any) -> list[str]:
    return [item.name for item in fields(owner) if item.default is MISSING and item.default_factory is MISSING]


def _elsewhere(name: str, prefix: str) -> str:
    """A hint for a key written in the wrong section, or under the wrong kind of its section."""
    found = [path for path in _paths(RunConfig, "") if path.endswith(f".{name}")]
    if re.sub(r"\[\d+\]", "", prefix) + name in found:
        return f" of this kind of {prefix.rstrip('.')}"
    return f"; did you mean {found[0]!r}?" if found else ""


def _paths(owner: type, prefix: str) -> Iterator[str]:
    for name, hint in get_type_hints(owner).items():
        yield prefix + name
        for section in _sections(_item(hint) or hint):
            yield from _paths(section, f"{prefix}{name}.")


def _tree(value: Any) -> Any:
    """Nested dataclasses as nested dicts, `kind` first."""
    if isinstance(value, tuple):
        return tuple(_tree(item) for item in value)
    if not is_dataclass(value):
        return dict(value) if isinstance(value, Mapping) else value
    names = sorted((item.name for item in fields(value)), key=lambda name: name != "kind")
    return {name: _tree(getattr(value, name)) for name in names}
