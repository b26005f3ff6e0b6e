"""Values out of a row's columns: nested ones, conversations, answers, each as struct, numpy array or JSON text."""

import json
import math
from collections.abc import Mapping
from typing import Any

from gppo_megatron.data.files.faults import UnusableRowError, excerpt


def cell(values: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where any part of it is missing. Raises UnusableRowError for a damaged one."""
    value: Any = values
    for name in path.split("."):
        value = _from_json(value, path) if isinstance(value, str) else value
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise UnusableRowError("malformed_row", f"{path}: {excerpt(str(value))} has no {name!r}")
        value = value.get(name)
    # Arrays and scalars of numpy: what pandas makes of nested columns.
    return value.tolist() if hasattr(value, "tolist") else value


def problem_text(value: Any, path: str) -> str:
    """The text of a problem: plain text, or a conversation's one user turn; empty where there is none.

    Raises UnusableRowError for anything else.
    """
    if isinstance(value, str) and value.lstrip().startswith('[{"'):
        value = _from_json(value, path)
    if isinstance(value, list):
        return _user_turn(value, path)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnusableRowError("malformed_row", f"{path} is a {type(value).__name__}, not text")
    return value


def answer_texts(value: Any, path: str) -> tuple[str, ...]:
    """The answers that a column holds: text, a number, or a list of these. Raises UnusableRowError."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return tuple(text for item in value for text in answer_texts(item, path))
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ()
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UnusableRowError("malformed_row", f"{path} is a {type(value).__name__}, not an answer")
    return (trimmed(str(value)),)


def trimmed(text: str) -> str:
    """The text without blanks and line ends around it, its lines ended by a newline alone.

    Every other control character stays: Python strips a form feed, and with it the sign that "rac" was "\\frac".
    """
    return text.replace("\r\n", "\n").strip(" \n")


def listed(value: Any, path: str) -> Any:
    """The value itself, or the list that its text holds in JSON."""
    return _from_json(value, path) if isinstance(value, str) and value.startswith("[") else value


def _user_turn(turns: list[Any], path: str) -> str:
    """The one user turn, which must be the last; instructions of a system turn ahead of it are the data's template."""
    roles = []
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), str):
            raise UnusableRowError("malformed_row", f"{path}: a turn is not {{role, content}} with text in both")
        roles.append(turn.get("role"))
    if not roles:
        return ""
    if roles[-1] != "user":
        raise UnusableRowError("bad_chat", f"{path} ends in a turn of the role {roles[-1]!a}")
    if roles.count("user") > 1 or roles[:-1] not in ([], ["system"]):
        raise UnusableRowError(
            "bad_chat", f"{path} has the turns {', '.join(map(str, roles))}; one of the user is read"
        )
    text: str = turns[-1]["content"]
    return text


def _from_json(text: str, path: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableRowError("malformed_row", f"{path}: {excerpt(text)} is not JSON: {error}") from None
