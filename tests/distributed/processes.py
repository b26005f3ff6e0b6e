"""Starting test scripts as the processes of one group."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_group(script: Path, arguments: Sequence[str], processes: int, timeout_seconds: float = 120) -> None:
    """Run `script` as `processes` ranks; raises AssertionError with the output of a rank that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *arguments],
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [f"rank {i}:\n{output}" for i, output in enumerate(outputs) if ranks[i].returncode]
    assert not failed, "\n".join(failed)
