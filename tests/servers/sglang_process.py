"""The real SGLang server on this CPU, from the environment that sglang/install.sh builds."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from gppo_megatron.weight_sync.distributed import free_port

START_SECONDS = 600
HERE = Path(__file__).parent
ARGUMENTS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "16384",
    "--max-running-requests", "64", "--mem-fraction-static", "0.2", "--skip-server-warmup",
)  # fmt: skip
SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Running:
    """A server's address, and the process group of all its processes."""

    url: str
    group: int

    def kill(self) -> None:
        os.killpg(self.group, signal.SIGKILL)


def environment() -> Path:
    """The server's virtual environment: $SGLANG_VENV, or `.venv-sglang` of this checkout."""
    return Path(os.environ.get("SGLANG_VENV", HERE.parent.parent / ".venv-sglang"))


@contextmanager
def sglang_server(model: Path, log: Path, port: int | None = None) -> Iterator[Running]:
    """Start a server of the model folder and wait until it serves; every process of it ends with the block."""
    port = port or free_port()
    command = [str(environment() / "bin" / "python"), "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *ARGUMENTS]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | SETTINGS,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Running(f"http://127.0.0.1:{port}", process.pid)
    try:
        _wait(running, process, log)
        yield running
    finally:
        if process.poll() is None:
            running.kill()
        process.wait()


def _wait(running: Running, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        try:
            if httpx.get(f"{running.url}/model_info", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"the server is not ready after {START_SECONDS} s:\n{log.read_text()[-3000:]}")
