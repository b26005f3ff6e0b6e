"""The sandboxes under test. A back end that this machine lacks is an error here, never a skip."""

import pytest
from gppo_verifiers.code.grader import Grader
from gppo_verifiers.code.selftest import SANDBOXES as ALL
from gppo_verifiers.code.turns import Turns

from tests.judge.engine import engine

SANDBOXES = {name: sandbox for name, sandbox in ALL.items() if name != "runc"}
"""runc differs from crun by its command line alone, which the self-test covers."""


@pytest.fixture(scope="session")
def docker_engine():
    with engine() as running:
        yield running


@pytest.fixture
def engine_of(request):
    """Call it with a sandbox's name: what that needs to run is started."""
    return lambda name: name == "docker" and request.getfixturevalue("docker_engine")


@pytest.fixture(scope="session", params=SANDBOXES)
def sandbox(request):
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    sandbox = SANDBOXES[request.param]()
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def cell(sandbox):
    cell = sandbox.open_cell()
    yield cell
    cell.close()


@pytest.fixture(scope="module")
def grader(sandbox):
    grader = Grader(sandbox, Turns())
    yield grader
    grader.close()
