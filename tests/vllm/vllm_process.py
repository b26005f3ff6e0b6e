"""The real vLLM server on this CPU, from the environment that install.sh builds."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from gppo_megatron.weight_sync.distributed import free_port

START_SECONDS = 900
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def environment() -> Path:
    """The server's virtual environment: $VLLM_VENV, or `.venv-vllm` of this checkout."""
    return Path(os.environ.get("VLLM_VENV", Path(__file__).parents[2] / ".venv-vllm"))


@contextmanager
def vllm_server(model: Path, log: Path, context: int) -> Iterator[str]:
    """The address of a server of the model folder, once it serves; every process of it ends with the block."""
    port = free_port()
    command = [str(environment() / "bin" / "vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(context), "--max-num-seqs", "64"]
    command += ["--max-logprobs", "100", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=inherited | SETTINGS, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"the server is not ready after {START_SECONDS} s:\n{log.read_text()[-3000:]}")
