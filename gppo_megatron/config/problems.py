"""How problems of a configuration are worded and gathered. A problem is one line: `dotted.path: what is wrong`."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from gppo_megatron.errors import ConfigError

LONGEST_VALUE = 60


def config_error(source: str, problems: Sequence[str]) -> ConfigError:
    """One error that lists every problem; `source` is the file, or whatever else holds the configuration."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n  ".join([f"{source}: {count}", *problems]))


def show(value: object) -> str:
    """A value as the user wrote it, or nearly: never longer than a line's tail."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean ...?' for the most similar of `names`, or nothing when none is similar."""
    matches = get_close_matches(name, list(names), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
