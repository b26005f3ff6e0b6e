"""YAML as this project reads and writes it.

Numbers follow YAML 1.2 (`1e-6` is a number, `010` is ten, `yes` is text) with `_` allowed between digits.
Keys are text and unique. Anchors, aliases and tags are refused: a run is a plain tree.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

TAG = "tag:yaml.org,2002:"
DIGITS = "-+0123456789"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise yaml.composer.ComposerError(
                problem="anchors, aliases and tags are not supported", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_line: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag != TAG + "str":
                raise yaml.constructor.ConstructorError(
                    problem="a key must be text; write it in quotes", problem_mark=key.start_mark
                )
            if key.value in first_line:
                problem = f"key {key.value!r} is written twice, first in line {first_line[key.value]}"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            first_line[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _flow_list(dumper: _Dumper, value: tuple[Any, ...]) -> yaml.Node:
    return dumper.represent_sequence(TAG + "seq", value, flow_style=True)


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    # Only the double-quoted style writes control characters and exotic line breaks as escapes.
    return dumper.represent_scalar(TAG + "str", value, style=None if value.isprintable() else '"')


_RULES = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", DIGITS),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", DIGITS + "."),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
)
for _kind, _pattern, _first in _RULES:
    _Loader.add_implicit_resolver(TAG + _kind, re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor(TAG + "int", _integer)
_Loader.add_constructor(TAG + "float", _number)
_Dumper.add_representer(tuple, _flow_list)
_Dumper.add_representer(str, _text)


def parse(text: str) -> Any:
    """The value a YAML text holds. Raises ValueError: `line 3, column 5: what is wrong`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        raise ValueError(f"character number {error.position + 1} (#x{error.character:04x}) is not allowed") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(where + ", ".join(filter(None, (error.context, error.problem)))) from None


def parse_scalar(text: str) -> Any:
    """The value of an unquoted scalar; every text is one, so nothing in it needs escaping."""
    loader: Any = _Loader("")
    return loader.construct_object(yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text))


def render(tree: Any) -> str:
    """YAML text that `parse` reads back to an equal tree (tuples as lists), keys in their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=110)
