"""The `gppo` command: what it prints, what it returns, and what it does not import."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import launchers.local
from gppo_megatron.cli import main
from gppo_megatron.config.load import load
from gppo_megatron.config.schema import RunConfig
from gppo_megatron.errors import DataError, Interrupted, PeerLostError
from launchers.plan import ProcessPlan

RUN = """\
run: {folder}/out
steps: 10
model: {{kind: tiny}}
data: {{kind: reasoning_gym, task: chain_sum}}
rollout: {{max_new_tokens: 16}}
"""


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank from outside, and Ctrl-C as it was."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(folder=tmp_path))
    return str(file)


def training(monkeypatch: pytest.MonkeyPatch, run_training: Callable[[RunConfig, bool], None]) -> None:
    """Put `run_training` where the command finds the real one."""
    module = ModuleType("gppo_megatron.build")
    module.run_training = run_training  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gppo_megatron.build", module)


def raising(error: BaseException) -> Callable[[RunConfig, bool], None]:
    def run_training(config: RunConfig, resume: bool) -> None:
        raise error

    return run_training


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], ["train", "launch", "examples:"]),
        (["train", "--help"], ["RUN.yaml", "key=value", "--print"]),
        (["launch", "--help"], ["RUN.yaml", "key=value", "--on"]),
    ],
)
def test_help_renders(arguments: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(word in text for word in shown)


@pytest.mark.parametrize(
    "arguments", [[], ["trian"], ["train"], ["train", "a.yaml", "--prin"], ["launch", "a", "--on=k8"]]
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: gppo")


def test_print_shows_a_configuration_that_loads_again(
    run_yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", run_yaml, "steps=3", "--print", "optimizer.lr=1e-5"]) == 0
    shown = capsys.readouterr().out
    assert "# objective  gppo: kl_fwd x atomic" in shown
    (tmp_path / "again.yaml").write_text(shown)
    assert load(tmp_path / "again.yaml") == load(run_yaml, ["steps=3", "optimizer.lr=1e-5"])
    assert not (tmp_path / "out").exists()


def test_training_gets_the_configuration(
    run_yaml: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[RunConfig, bool]] = []
    training(monkeypatch, lambda config, resume: seen.append((config, resume)))
    assert main(["train", run_yaml, "seed=4"]) == 0
    assert main(["train", run_yaml, "--resume", "seed=5"]) == 0
    assert seen == [(load(run_yaml, ["seed=4"]), False), (load(run_yaml, ["seed=5"]), True)]
    assert capsys.readouterr().out.startswith("model      qwen3, ")


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_user_s_mistake_is_a_message(run_yaml: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, run_yaml, "stesp=3", "batch.group=1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{run_yaml}: 2 problems",
        "  batch.group: must be >= 2: a group of 1 is its own baseline, so every advantage would be 0 (got 1)",
        "  stesp: no such key; did you mean 'steps'?",
    ]
    assert main([command, run_yaml, "parallel.tensor=3"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"{run_yaml}: 1 problem"


@pytest.mark.parametrize("command", ["train", "launch"])
def test_an_existing_run_folder_is_refused(
    run_yaml: str, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert main([command, run_yaml]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "launch"])
def test_a_complete_run_has_nothing_to_resume(
    run_yaml: str, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "hf").mkdir(parents=True)
    assert main([command, run_yaml, "--resume"]) == 0
    assert capsys.readouterr() == (f"this run is complete: its trained model is {tmp_path / 'out' / 'hf'}\n", "")


def test_the_number_of_processes_is_checked(
    run_yaml: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", run_yaml, "parallel.tensor=2"]) == 2
    assert "= 2 processes, but 1 was started; start 2" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    assert main(["train", run_yaml, "parallel.tensor=2"]) == 2
    assert "= 2 processes, but 3 were started" in capsys.readouterr().err
    assert waited == [5.0]  # rank 0 says it first, and ends the others


def test_only_rank_0_looks_at_the_run_folder_and_speaks(
    run_yaml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()  # rank 0 may already have made it
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    training(monkeypatch, lambda config, resume: None)
    assert main(["train", run_yaml, "parallel.tensor=2"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (DataError("no such task"), 3, "no such task\n"),
        (PeerLostError("rank 1 is gone"), 75, ""),
        (Interrupted("stopped after step 3"), 143, "SIGTERM: stopped after step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_how_training_may_end(
    run_yaml: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    training(monkeypatch, raising(error))
    assert main(["train", run_yaml]) == status
    assert capsys.readouterr().err == message


def test_launch_plans_every_process(run_yaml: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[ProcessPlan] = []

    def run_processes(given: tuple[ProcessPlan, ...], grace_seconds: float, companions: object) -> int:
        assert (grace_seconds, companions) == (60, launchers.local.NO_COMPANIONS)
        plans.extend(given)
        return 7

    monkeypatch.setattr(launchers.local, "run_processes", run_processes)
    assert main(["launch", run_yaml, "--on", "local", "parallel.tensor=2"]) == 7
    assert [plan.environment["RANK"] for plan in plans] == ["0", "1"]
    assert plans[0].argv[1:] == ("-m", "gppo_megatron", "train", run_yaml, "parallel.tensor=2")
    assert main(["launch", "--resume", run_yaml, "seed=2"]) == 7
    assert plans[2].argv[3:] == ("train", run_yaml, "seed=2", "--resume")


def test_a_reader_that_is_gone_is_no_traceback(run_yaml: str) -> None:
    command = f"{sys.executable} -m gppo_megatron train {run_yaml} --print; echo $? >&2"
    shell = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    shell.stdout.close()
    assert shell.stderr is not None
    assert shell.stderr.read() == "141\n"
    shell.stderr.close()
    shell.wait()


def test_neither_print_nor_launch_imports_torch(run_yaml: str) -> None:
    script = f"""
import sys
import launchers.local
from gppo_megatron.cli import main
launchers.local.run_processes = lambda plans, grace_seconds, companions: len(plans)
assert main(["train", {run_yaml!r}, "--print"]) == 0
assert main(["launch", {run_yaml!r}, "parallel.data=2"]) == 2
heavy = {{"torch", "numpy", "transformers", "megatron", "reasoning_gym"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_module_runs_and_shows_no_traceback(run_yaml: str) -> None:
    command = [sys.executable, "-m", "gppo_megatron", "train", run_yaml, "rollout.temperature=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"{run_yaml}: 1 problem"
    assert "Traceback" not in done.stderr


def test_ctrl_c_kills_a_rank_at_once(run_yaml: str, tmp_path: Path) -> None:
    script = f"""
import sys, time, types
module = types.ModuleType("gppo_megatron.build")
def run_training(config, resume):
    open({str(tmp_path / "ready")!r}, "w").close()
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass  # as deaf as a thread inside a collective
module.run_training = run_training
sys.modules[module.__name__] = module
from gppo_megatron.cli import main
main(["train", {run_yaml!r}])
"""
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(timeout=60) == -signal.SIGINT
        finally:
            process.kill()


def test_a_full_disk_is_one_line(
    run_yaml: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training(monkeypatch, raising(OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")))
    assert main(["train", run_yaml]) == 1
    assert capsys.readouterr().err == "no space left on the disk for metrics.jsonl\n"
    training(monkeypatch, raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        main(["train", run_yaml])
