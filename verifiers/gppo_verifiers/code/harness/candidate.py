"""Loads the program and calls its functions on request: a line of JSON in, a line of JSON out.

Request: [function, arguments, keywords] as `gppo_values` writes it. Reply: ("value", it), ("raised", type, message), or
("unsupported", what). Expected results never come here, so all a program can forge is its own answer.
"""

import os
import sys
import types
from typing import Any

import gppo_values  # type: ignore[import-not-found]  # beside this file in the work directory

SOURCE = "solution.py"
KNOWN = (
    "from typing import *\n"
    "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string\n"
    "from collections import Counter, OrderedDict, defaultdict, deque\n"
)
"""What programs written for an online editor expect to find."""


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    program = load()
    for line in requests:
        name, arguments, keywords = gppo_values.decode(line)
        reply = answer(program, name, arguments, keywords).encode() + b"\n"
        while reply:
            reply = reply[os.write(replies, reply) :]


def load() -> Any:
    """The program as a module that is not the main one."""
    module = types.ModuleType("solution")
    module.__dict__["__file__"] = os.path.abspath(SOURCE)
    sys.modules["solution"] = module
    exec(KNOWN, module.__dict__)
    with open(SOURCE, "rb") as file:
        exec(compile(file.read(), SOURCE, "exec"), module.__dict__)
    return module


def answer(program: Any, name: str, arguments: Any, keywords: Any) -> str:
    try:
        value = find(program, name)(*arguments, **keywords)
    except Exception as error:  # noqa: BLE001 - what a program raises is part of its answer
        return str(gppo_values.encode(("raised", type(error).__name__, str(error)[:1000])))
    try:
        return str(gppo_values.encode(("value", value)))
    except gppo_values.UnsupportedError as error:
        return str(gppo_values.encode(("unsupported", str(error))))


def find(program: Any, name: str) -> Any:
    """The function, or the method of a class `Solution`."""
    if hasattr(program, name):
        return getattr(program, name)
    return getattr(program.Solution(), name)


if __name__ == "__main__":
    main()
