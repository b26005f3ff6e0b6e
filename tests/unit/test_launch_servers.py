"""The servers that a launcher starts: their commands, and small fake ones that die, start again, and end with it."""

import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gppo_megatron.config.checks import check
from gppo_megatron.config.load import load
from gppo_megatron.config.rollouts import SglangRollout, VllmRollout
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.config.server_checks import LAUNCHED, check_started
from gppo_megatron.config.started import ADDRESS, Start, StartEmbedded, StartSglang, StartVllm
from gppo_megatron.errors import ConfigError
from launchers.plan import plan_processes
from launchers.plan_servers import ServerPlan, plan_servers
from launchers.servers import Servers, check_startable
from tests.unit.test_launch_local import alive, eventually

INHERITED = {
    "PATH": "/bin",
    "PYTHONPATH": "/here",
    "VIRTUAL_ENV": "/here",
    "HOME": "/root",
    "CUDA_VISIBLE_DEVICES": "0",
}
MODEL = Path("/models/m")


def configured(start: Start, **changed: Any) -> RunConfig:
    rollout: Any = VllmRollout if isinstance(start, StartVllm) else SglangRollout
    config = load("launchers/recipes/demo.yaml", ["precision.dtype=bfloat16", "threads=3"])
    return replace(config, run="/runs/r", rollout=rollout(max_new_tokens=4, context=99, start=start, **changed))


def planned(start: Start) -> tuple[ServerPlan, ...]:
    config = configured(start)
    rollout = config.rollout
    assert isinstance(rollout, SglangRollout | VllmRollout)
    return plan_servers(rollout, start, config, MODEL, INHERITED)


def test_each_server_has_its_port_its_log_and_its_gpus() -> None:
    start = StartSglang(python="/sg/bin/python", count=2, port=31000, gpus=("0,1", "2,3"), arguments=("--tp", "2"))
    one, two = planned(start)
    assert one.argv == (
        "/sg/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/m", "--context-length", "99",
        "--host", ADDRESS, "--port", "31000", "--dtype", "bfloat16", "--tp", "2",
    )  # fmt: skip
    assert (one.url, two.url) == start.urls == (f"http://{ADDRESS}:31000", f"http://{ADDRESS}:31001")
    assert two.argv == tuple("31001" if word == "31000" else word for word in one.argv)
    assert (one.log, two.log) == (Path("/runs/r/servers/31000.log"), Path("/runs/r/servers/31001.log"))
    assert one.environment == {
        "PATH": "/sg/bin:/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "3"
    }  # fmt: skip
    assert two.environment["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_vllm_gets_what_it_must_be_started_with() -> None:
    (plan,) = planned(StartVllm(python="/v/bin/python", environment={"VLLM_CPU_KVCACHE_SPACE": "1", "PATH": "/mine"}))
    assert plan.argv[:5] == ("/v/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/m")
    assert {"--enable-scale-out", "processed_logprobs"} < set(plan.argv)
    assert plan.environment["VLLM_SERVER_DEV_MODE"] == plan.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert plan.environment["PATH"] == "/mine"


def test_the_embedded_server_is_of_this_installation() -> None:
    (plan,) = planned(StartEmbedded())
    assert plan.argv[:5] == (sys.executable, "-m", "gppo_megatron", "serve-embedded", "/models/m")
    assert plan.environment == {**INHERITED, "OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("start", "changed", "problem"),
    [
        (StartEmbedded(), {"urls": ("http://a:1",)}, "rollout: one of urls, router and start says where the ser"),
        (StartEmbedded(port=65_535, count=2), {}, "rollout.start.port: 2 servers need ports up to 65536"),
        (
            StartEmbedded(count=2, gpus=("0",)),
            {},
            "rollout.start.gpus: must name those of each of the 2 servers (got 1",
        ),
        (StartEmbedded(arguments=("--port=3",)), {}, "rollout.start.arguments: --port=3 follows from the run itself"),
        (StartSglang(python="/no/python"), {}, "rollout.start.python: must be the python of the environment that ho"),
        (StartVllm(python="/tmp"), {}, "rollout.start.python: must be the python of the environment that holds vllm"),
        (StartEmbedded(count=0), {}, "rollout.start.count: must be >= 1 (got 0)"),
    ],
)
def test_what_cannot_be_started_is_one_message(start: Start, changed: dict[str, Any], problem: str) -> None:
    config = replace(configured(start, **changed), precision=load("launchers/recipes/demo.yaml").precision)
    with pytest.raises(ConfigError) as error:
        check(config)
    (line,) = str(error.value).splitlines()[1:]
    assert line.strip().startswith(problem)


def test_servers_that_are_nowhere_are_one_message() -> None:
    config = replace(configured(StartEmbedded()), rollout=SglangRollout(max_new_tokens=4, context=99))
    with pytest.raises(ConfigError, match=r"rollout: one of urls, router and start says where .* \(got none\)"):
        check(config)


def test_a_package_that_is_not_there_and_a_port_in_use_are_one_message() -> None:
    with pytest.raises(ConfigError, match=f"rollout.start.python: {sys.executable} finds no package vllm; install"):
        check_startable(StartVllm(python=sys.executable, port=free()))
    with socket.create_server((ADDRESS, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"rollout.start.port: {ADDRESS}:{port} cannot be served at"):
            check_startable(StartEmbedded(port=port))
    check_startable(StartEmbedded(port=free()))


def free() -> int:
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def test_a_process_that_no_launcher_started_has_no_servers() -> None:
    config = configured(StartEmbedded())
    with pytest.raises(ConfigError, match="rollout.start: `gppo launch` alone starts servers"):
        check_started(config, {})
    (plan, *_) = plan_processes(config, "run.yaml", [], 1)
    check_started(config, plan.environment)
    assert LAUNCHED in plan.environment


FAKE = """
import json, os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print("born", flush=True)
with open(sys.argv[1], "a") as file:
    file.write(json.dumps([os.getpid(), child.pid]) + "\\n")
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(0 if sys.argv[2] == "dies" else 600)
sys.exit(7)
"""


class Fakes:
    """Fake servers, each with a child, and the process ids of all that ever ran."""

    def __init__(self, folder: Path, kind: str, restarts: int, seconds: float = 600.0) -> None:
        self.pids, self.ready = folder / "pids", False
        command = (sys.executable, "-S", "-c", FAKE, str(self.pids), kind)
        plan = ServerPlan("http://a:1", command, {"PATH": "/bin"}, folder / "servers" / "1.log")
        self.servers = Servers([plan], lambda: self.ready, restarts, seconds)

    def born(self) -> list[list[int]]:
        return [json.loads(line) for line in self.pids.read_text().splitlines()] if self.pids.exists() else []

    def until(self, count: int) -> None:
        def there() -> bool:
            assert self.servers.watch() == ""
            return len(self.born()) == count

        eventually(there)

    def gone(self) -> bool:
        return not any(alive(pid) for pids in self.born() for pid in pids)


def test_nothing_is_started_before_the_run_is_ready(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, "lives", restarts=0)
    assert fakes.servers.watch() == ""
    assert not (tmp_path / "servers").exists()
    fakes.ready = True
    fakes.until(1)
    fakes.servers.close()
    assert fakes.gone()


@pytest.mark.parametrize("kind", ["lives", "deaf"])
def test_a_server_that_is_killed_starts_again_without_its_children(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launchers.servers.STOP_SECONDS", 0.2)
    fakes = Fakes(tmp_path, kind, restarts=2)
    fakes.ready = True
    fakes.until(1)
    server, child = fakes.born()[0]
    os.kill(server, signal.SIGKILL)
    fakes.until(2)
    eventually(lambda: not alive(child))
    said = "rollout server http://a:1 was killed by signal SIGKILL; started again (1 of 2 times in 600 s)"
    assert said in capsys.readouterr().err.splitlines()
    assert fakes.born()[1] != [server, child]
    fakes.servers.close()
    eventually(fakes.gone)
    assert (tmp_path / "servers" / "1.log").read_text() == "born\nborn\n"


def test_one_that_dies_too_often_ends_the_run_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, "dies", restarts=2)
    fakes.ready = True
    fault = ""

    def over() -> bool:
        nonlocal fault
        fault = fakes.servers.watch()
        return bool(fault)

    eventually(over)
    fakes.servers.close()
    log = tmp_path / "servers" / "1.log"
    assert fault == (
        f"rollout server http://a:1 exited with status 7, for the 3. time in 600 s; its log {log} ends:\n"
        "    born\n    born\n    born"
    )
    eventually(fakes.gone)


def test_deaths_long_ago_do_not_count(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, "dies", restarts=1, seconds=0.0)
    fakes.ready = True
    fakes.until(4)
    fakes.servers.close()
    eventually(fakes.gone)
