"""The root folder of a box: empty places for what is mounted there, and the supervisor's files."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gppo_verifiers.sandbox.base import PYTHON, WORK_DIRECTORY, IsolationError

PREFIX = "gppo-judge-"
PARENT = Path("/run")
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS: Mapping[str, str] = {
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    "dev/fd": "/proc/self/fd",
    "dev/shm": WORK_DIRECTORY,
}
READABLE = ("bin", "sbin", "lib", "lib64", "lib32")
HIDDEN = ("/usr/local", "/usr/src")
"""Not of the system: the judge itself may be installed there."""
INSIDE = ("gppo_box.py", "gppo_inside.py", "zygote_server.py")
SUPERVISOR, SERVER = "/judge/gppo_box.py", "/judge/zygote_server.py"


class Root:
    """A folder of one judge. A lock shows that the judge lives; folders of judges that were killed are removed.

    path: to be mounted read-only as the root. folders: of the machine, to be mounted at the same place in it.
    Raises IsolationError where it cannot be made.
    """

    def __init__(self, parent: Path = PARENT) -> None:
        try:
            _remove_abandoned(parent)
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock: int | None = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.folder.chmod(0o755)
            self.path = self.folder / "root"
            self.folders = _build(self.path)
        except (OSError, subprocess.CalledProcessError) as error:
            raise IsolationError(f"no root folder for programs can be made in {parent}: {error}") from error

    def close(self) -> None:
        """Remove it; may be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.folder)
            os.close(self._lock)
            self._lock = None


def _build(root: Path) -> list[str]:
    for name in ("", "usr", "proc", "dev", "tmp", "etc", "judge"):
        (root / name).mkdir()
    folders = ["/usr", *_other_folders(root)]
    (root / "etc/passwd").write_text(f"nobody:x:65534:65534::{WORK_DIRECTORY}:/bin/sh\n")
    for name in DEVICES:
        (root / "dev" / name).touch()
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    for name in INSIDE:
        shutil.copyfile(Path(__file__).with_name(name), root / "judge" / name)
    # A box loads them at every run, so they are compiled here, by the Python that will load them.
    subprocess.run([PYTHON, "-I", "-m", "compileall", "-q", str(root / "judge")], check=True, env={})
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return folders


def _other_folders(root: Path) -> list[str]:
    """Places for what belongs to /usr; returns those to be mounted, as older systems have them."""
    folders = []
    for name in (*READABLE, "etc/alternatives"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
        elif Path("/", name).is_dir():
            (root / name).mkdir()
            folders.append(f"/{name}")
    return folders


def _remove_abandoned(parent: Path) -> None:
    """What cannot be removed, or was made a moment ago and is not locked yet, is left for the next start."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / "root").exists():
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
