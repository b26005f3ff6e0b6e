"""A Docker engine of the tests' own: Debian's `docker.io`, started here and ended with all that it made.

    python -m tests.judge.engine python -m tests.judge.soak --runs 300 --sandbox docker

runs a command with it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gppo_verifiers.sandbox.base import IsolationError
from gppo_verifiers.sandbox.engine import Engine

OPTIONS = ("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false", "--bridge=none")
START_SECONDS = 120.0


class OwnEngine:
    """One engine in a folder of its own, to be killed and started again at will."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Returns when it answers. One that gives up, as it does where containerd is slow, is started again."""
        deadline = time.monotonic() + START_SECONDS
        self.process = self._launch()
        while True:
            try:
                Engine().call("GET", "/version")
                return self.process
            except IsolationError:
                if time.monotonic() > deadline:
                    self.process.kill()
                    raise RuntimeError(f"dockerd: {(self._folder / 'log').read_text()[-2000:]}") from None
                if self.process.poll() is not None:
                    self.process = self._launch()
            time.sleep(0.1)

    def _launch(self) -> subprocess.Popen[bytes]:
        folder = self._folder
        paths = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
        with open(folder / "log", "ab") as log:
            return subprocess.Popen(
                ["dockerd", *paths, "--host", f"unix://{folder}/socket", *OPTIONS], stdout=log, stderr=log
            )

    def kill(self) -> None:
        """By SIGKILL; its containers live on."""
        self.process.kill()
        self.process.wait(60)


@contextmanager
def engine() -> Iterator[OwnEngine]:
    """An engine whose socket $DOCKER_HOST names. Fails where there is no dockerd: apt install docker.io."""
    folder = Path(tempfile.mkdtemp(prefix="test-engine-", dir="/var/tmp"))
    before = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = f"unix://{folder}/socket"
    try:
        running = OwnEngine(folder)
        try:
            yield running
        finally:
            running.process.terminate()
            running.process.wait(60)
            subprocess.run(["pkill", "--full", "--signal", "KILL", f"containerd.* {folder}/exec"], check=False)
            unmount(folder)
    finally:
        os.environ.pop("DOCKER_HOST")
        if before is not None:
            os.environ["DOCKER_HOST"] = before
        shutil.rmtree(folder)


def unmount(folder: Path) -> None:
    """What a killed engine has left mounted below the folder; deepest first."""
    with open("/proc/self/mountinfo") as file:
        points = [line.split()[4] for line in file]
    for point in reversed(points):
        if Path(point).is_relative_to(folder):
            subprocess.run(["umount", "--lazy", point], check=True)


def main() -> int:
    with engine():
        return subprocess.run(sys.argv[1:]).returncode


if __name__ == "__main__":
    sys.exit(main())
