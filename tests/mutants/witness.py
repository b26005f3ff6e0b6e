"""A pytest plugin, loaded inside a copy of the tree: writes down which failures were a test's and what was imported."""

import json
import sys
from pathlib import Path

import hypothesis
import pytest

OURS = {"checkpoints_tools", "gppo_megatron", "gppo_verifiers", "launchers", "tests"}
MALFORMED = (NameError, SyntaxError, ImportError)
"""What a careless fault raises: the code did not run, so no test of what it computes has noticed anything."""

# The same examples each time, so that no fault is noticed by luck; and no time spent on making an example small.
hypothesis.settings.register_profile(
    "witness", derandomize=True, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--witness", type=Path, required=True, help="the file to write")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("witness")
    config.pluginmanager.register(Witness(config.getoption("--witness"), config.rootpath))


class Witness:
    """The file holds `failed`, the tests whose own call failed, and `strangers`, our modules from outside the tree."""

    def __init__(self, file: Path, tree: Path) -> None:
        self._file = file
        self._tree = tree
        self._failed: list[str] = []

    def pytest_exception_interact(self, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """A failure of collection, of a fixture or of malformed code is no test's."""
        if call.when == "call" and call.excinfo is not None and not issubclass(call.excinfo.type, MALFORMED):
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        ours = [module for name, module in sys.modules.items() if name.split(".")[0] in OURS]
        files = [Path(file).resolve() for module in ours if (file := getattr(module, "__file__", None))]
        strangers = [str(file) for file in files if not file.is_relative_to(self._tree.resolve())]
        self._file.write_text(json.dumps({"failed": self._failed, "strangers": strangers}))
