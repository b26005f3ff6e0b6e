"""The command line of `gppo serve-verifiers`."""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gppo_verifiers.code.languages import LANGUAGES
from gppo_verifiers.code.selftest import SANDBOXES
from gppo_verifiers.errors import ServiceError
from gppo_verifiers.sandbox.base import Limits


@dataclass(frozen=True)
class Options:
    """token: required from every asker; it may be missing on an address of this machine alone.

    queue: jobs that may wait. drain_seconds: how long a stopping service goes on for the jobs it has.
    cpu_seconds, memory_mib: what a test may use where its task sets no limits.
    """

    host: str
    port: int
    token: str | None
    sandbox: str
    languages: Sequence[str]
    workers: int
    queue: int
    canary_seconds: float
    drain_seconds: float
    cpu_seconds: float
    memory_mib: int


def add_service_arguments(parser: ArgumentParser) -> None:
    limits = Limits()
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    parser.add_argument("--port", type=port_number, default=8100, help="default: 8100; 0 takes a free one")
    parser.add_argument(
        "--token-env", metavar="NAME", help="environment variable with the token askers must bear; needed off loopback"
    )
    parser.add_argument("--sandbox", choices=sorted(SANDBOXES), default="zygote", help="where programs run")
    parser.add_argument("--languages", nargs="+", choices=sorted(LANGUAGES), default=["python"], help="default: python")
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="programs at once, default 1")
    parser.add_argument("--queue", type=count, default=1024, metavar="N", help="jobs that may wait, default 1024")
    parser.add_argument(
        "--cpu-seconds", type=above_zero, default=limits.cpu_seconds, metavar="S", help="limit of a test, default 4"
    )
    parser.add_argument(
        "--memory-mib", type=count, default=limits.memory_bytes >> 20, metavar="N", help="limit of a test, default 512"
    )
    parser.add_argument(
        "--canary-seconds", type=above_zero, default=60.0, metavar="S", help="between known programs, default 60"
    )
    parser.add_argument(
        "--drain-seconds",
        type=above_zero,
        default=120.0,
        metavar="S",
        help="SIGTERM waits for jobs so long, default 120",
    )
    parser.add_argument("--selftest", action="store_true", help="try the sandbox, print the table, and stop")


def read_options(given: Namespace, environment: Mapping[str, str]) -> Options:
    """Raises ServiceError where the environment lacks the token."""
    name = given.token_env
    if name is not None and not environment.get(name):
        raise ServiceError(f"--token-env {name}: the environment has no {name}; set it to the token")
    return Options(
        host=given.host,
        port=given.port,
        token=None if name is None else environment[name],
        sandbox=given.sandbox,
        languages=given.languages,
        workers=given.workers,
        queue=given.queue,
        canary_seconds=given.canary_seconds,
        drain_seconds=given.drain_seconds,
        cpu_seconds=given.cpu_seconds,
        memory_mib=given.memory_mib,
    )


def count(text: str) -> int:
    """A whole number of at least 1; argparse names the option where it is not."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number >= 1 (got {text!r})")
    return int(text)


def port_number(text: str) -> int:
    """0 to 65535; argparse names the option where it is not."""
    if not text.isdecimal() or int(text) > 65535:
        raise ArgumentTypeError(f"must be a port, 0 to 65535 (got {text!r})")
    return int(text)


def above_zero(text: str) -> float:
    """A number above 0; argparse names the option where it is not."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"must be a number > 0 (got {text!r})")
    return number
