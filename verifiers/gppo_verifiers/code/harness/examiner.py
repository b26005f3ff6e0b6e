"""Runs assert code whose function is a call to the program, in another sandbox. Says on standard error what came of it.

Standard output carries requests to the program's process, standard input its replies; see `candidate`. The report is
one line: [outcome, detail].
"""

import builtins
import json
import os
from typing import Any, NoReturn

import gppo_values  # type: ignore[import-not-found]  # beside this file in the work directory

MAX_REPLY_BYTES = 1 << 20
REPORT = os.dup(2)


class LostError(BaseException):
    """The program's process ended without an answer; no `except Exception` of a test may hide that."""


class BrokenRulesError(BaseException):
    """The program's process sent something that is no answer."""


class RaisedError(Exception):
    """The program raised an exception of a class of its own."""


class Function:
    """Calls the program's function of that name."""

    def __init__(self, name: str, requests: int, replies: Any) -> None:
        self._name, self._requests, self._replies = name, requests, replies
        self._broken: BaseException | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            return self._call(arguments, keywords)
        except (LostError, BrokenRulesError) as error:
            self._broken = self._broken or error
            raise

    def check(self) -> None:
        """Raises what a test may have caught that catches everything."""
        if self._broken is not None:
            raise self._broken

    def _call(self, arguments: Any, keywords: Any) -> Any:
        self._send(gppo_values.encode((self._name, arguments, keywords)).encode() + b"\n")
        line = self._replies.readline(MAX_REPLY_BYTES)
        if not line.endswith(b"\n"):
            raise BrokenRulesError("an answer that is too long") if len(line) == MAX_REPLY_BYTES else LostError()
        try:
            reply = gppo_values.decode(line)
            kind, *content = reply
        except (ValueError, TypeError) as error:
            raise BrokenRulesError(str(error)) from None
        if kind == "value" and len(content) == 1:
            return content[0]
        if kind == "raised" and len(content) == 2:
            raise raised(str(content[0]), str(content[1]))
        if kind == "unsupported" and len(content) == 1:
            raise BrokenRulesError(str(content[0]))
        raise BrokenRulesError("a reply of no known kind")

    def _send(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except BrokenPipeError:
            raise LostError from None


def raised(name: str, message: str) -> Exception:
    """The exception that the program raised, where it is a built-in one.

    Not what ends a loop: `all(map(function, inputs))` would take it for the end of the inputs.
    """
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (StopIteration, StopAsyncIteration):
        try:
            return kind(message)
        except TypeError:  # the few that need more than a message
            pass
    return RaisedError(f"{name}: {message}")


def report(outcome: str, detail: object = "") -> NoReturn:
    os.write(REPORT, json.dumps([outcome, str(detail)[:300]]).encode())
    os._exit(0)


def main() -> None:
    requests, replies = os.dup(1), os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    with open("task.json", encoding="utf-8") as file:
        task = json.load(file)
    space: dict[str, Any] = {"__name__": "__examiner__"}
    try:
        code = compile(task["code"], "asserts", "exec")
        exec(compile(task["setup"], "setup", "exec"), space)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's fault
        report("invalid", f"{type(error).__name__}: {error}")
    function = space[task["function"]] = Function(task["function"], requests, replies)
    try:
        exec(code, space)
        function.check()
    except LostError:
        report("lost")
    except BrokenRulesError as error:
        report("failed", error)
    except BaseException as error:  # noqa: BLE001 - any exception fails the asserts
        report("failed", f"{type(error).__name__}: {error}")
    os.close(requests)
    report("failed", "it spoke out of turn") if replies.read(1) else report("passed")


if __name__ == "__main__":
    main()
