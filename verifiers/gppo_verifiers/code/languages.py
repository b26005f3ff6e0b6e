"""The languages programs may be written in; a new one is one row."""

from collections.abc import Mapping
from dataclasses import dataclass

from gppo_verifiers.sandbox.base import PYTHON, Limits

BINARY = "program"
COMPILE_LIMITS = Limits(
    cpu_seconds=20.0,
    wall_seconds=120.0,
    memory_bytes=1 << 30,
    output_bytes=32 << 20,
    file_bytes=64 << 20,
)


@dataclass(frozen=True)
class Language:
    """names: what a fenced block may call it. source: the file's name.

    compile: a shell command that turns the source into a file BINARY; None where there is nothing to compile.
    run: the command. functions: whether its functions can be called, which the harness does for Python alone.
    sample: a program that reads two numbers and prints their sum, which the start-up self-test runs.
    """

    names: tuple[str, ...]
    source: str
    compile: str | None
    run: tuple[str, ...]
    functions: bool
    sample: str


LANGUAGES: Mapping[str, Language] = {
    "python": Language(
        names=("python", "python3", "py"),
        source="solution.py",
        compile=None,
        run=(PYTHON, "solution.py"),
        functions=True,
        sample="a, b = map(int, input().split())\nprint(a + b)\n",
    ),
    "cpp": Language(
        names=("cpp", "c++", "cc", "cxx"),
        source="solution.cpp",
        compile=f"/usr/bin/g++ -std=c++17 -O2 -pipe -o {BINARY} solution.cpp",
        run=(f"/tmp/{BINARY}",),
        functions=False,
        sample="#include <iostream>\nint main() { long long a, b; std::cin >> a >> b; std::cout << a + b << '\\n'; }\n",
    ),
}
