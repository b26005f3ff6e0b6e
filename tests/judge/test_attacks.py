"""Hostile programs are contained. Each prints `ran` first: a sandbox in which nothing runs contains everything."""

import json
import os
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from gppo_verifiers.sandbox.base import PYTHON
from gppo_verifiers.sandbox.sealed import sealed_file

from tests.judge.cases import LIMITS, cases, python

ATTACKS = cases("attacks")
MARKER = "a-secret-of-the-judge"
SLEEP = "98765"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What there is on the host to be attacked, as the text that programs read."""
    secret = tmp_path_factory.mktemp("host") / "secret"
    secret.write_text("secret")
    os.environ["GPPO_TEST_MARKER"] = MARKER
    victim = subprocess.Popen(["/bin/sleep", "1000"])
    name = f"gppo-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0" + name)
        local.listen()
        port = server.getsockname()[1]
        yield json.dumps(
            {
                "port": port,
                "socket": name,
                "secret": str(secret),
                "marker": MARKER,
                "pid": victim.pid,
                "sleep": SLEEP,
            }
        )
        assert victim.poll() is None, "a program killed a process of the host"
    victim.kill()
    victim.wait()
    del os.environ["GPPO_TEST_MARKER"]


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: case.name)
def test_an_attack_is_contained(cell, host, case):
    expected = case.expected
    stdin = bytes(expected.get("stdin_megabytes", 0) << 20) or host.encode() + b"\n"
    began = time.monotonic()
    limits = replace(LIMITS, **expected.get("limits", {}))
    facts = cell.run(python(case.source, stdin, limits))
    assert facts.fault == ""
    assert facts.end.value in expected["ends"], facts
    output = facts.stdout.decode("utf-8", "replace")
    assert output.startswith("ran\n"), facts
    assert "ESCAPED" not in output
    assert expected.get("last", "") in output.splitlines()[-1], facts
    assert facts.out_of_memory == expected.get("out_of_memory", False), facts
    if expected.get("refused"):
        assert facts.processes_refused > 0
    if "wall_below" in expected:
        assert time.monotonic() - began < expected["wall_below"]


@pytest.mark.parametrize("case", [case for case in ATTACKS if case.expected.get("control")], ids=lambda case: case.name)
def test_the_attack_works_where_nothing_holds_it(host, case, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(case.source)
    if case.name == "change_stdin":
        descriptor = os.memfd_create("unsealed")
        os.write(descriptor, host.encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        descriptor = sealed_file(host.encode() + b"\n")
    try:
        done = subprocess.run([PYTHON, path], stdin=descriptor, capture_output=True, text=True, timeout=60)
    finally:
        os.close(descriptor)
    assert "ESCAPED" in done.stdout, done


def test_nothing_that_an_attack_started_is_left():
    """Runs after the attacks of this file: `outlive` had left processes in sessions of their own."""
    arguments = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            arguments.append(Path(f"/proc/{process}/cmdline").read_bytes())
    assert arguments
    assert f"sleep\0{SLEEP}\0".encode() not in arguments
