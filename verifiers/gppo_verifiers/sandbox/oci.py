"""The OCI back end: one container a run, made by crun or runc."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gppo_verifiers.sandbox.base import ENVIRONMENT, PYTHON, WORK_DIRECTORY, Cell, IsolationError, Limits
from gppo_verifiers.sandbox.boxes import BoxCell
from gppo_verifiers.sandbox.cgroups import PREFIX, ROOT, open_hierarchy
from gppo_verifiers.sandbox.roots import DEVICES, HIDDEN, SUPERVISOR, Root
from gppo_verifiers.sandbox.seccomp import filter_program

FIRST_UID, UIDS = 64_000, 1000
CLEAN_SECONDS = 60.0
NAMESPACES = ("pid", "mount", "network", "ipc", "uts", "cgroup")
READ_ONLY_PATHS = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/asound")
MASKED_PATHS = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sched_debug", "/proc/scsi", "/proc/acpi")


@dataclass(frozen=True)
class Runtime:
    """A command that runs OCI containers. options: of its own. knows_hybrid: works beside version 2 of control groups.

    keeps_stdin: the container's standard input is that of the command, and not a copy of what comes from it.
    """

    name: str
    package: str
    options: tuple[str, ...] = ()
    knows_hybrid: bool = True
    keeps_stdin: bool = False


RUNTIMES = {
    # The run's control group is ours, so the runtime needs none, but runc cannot do without.
    "crun": Runtime("crun", "crun", ("--cgroup-manager=disabled",), knows_hybrid=False, keeps_stdin=True),
    "runc": Runtime("runc", "runc"),
}


class OciSandbox:
    """Implements `Sandbox`. runtime: a key of RUNTIMES."""

    def __init__(self, runtime: str) -> None:
        self.name = runtime
        self._runtime = RUNTIMES[runtime]
        if sys.platform != "linux" or os.geteuid() != 0:
            raise IsolationError(f"the {runtime} sandbox needs Linux and root, to make containers")
        if shutil.which(self._runtime.name) is None:
            raise IsolationError(f"there is no {runtime}; install it (Debian: apt install {self._runtime.package})")
        self._filter = filter_program()
        self._numbers = count()
        self._root = Root()
        try:
            self._hierarchy = open_hierarchy()
        except BaseException:
            self._root.close()
            raise

    def open_cell(self) -> Cell:
        number = next(self._numbers)
        launcher = OciLauncher(self._runtime, self._root, number)
        return BoxCell(self._hierarchy, launcher, self._filter)

    def close(self) -> None:
        self._hierarchy.close()
        self._root.close()


class OciLauncher:
    """Implements `Launcher`. number: of the cell."""

    def __init__(self, runtime: Runtime, root: Root, number: int) -> None:
        self._kind = runtime
        self.uid = FIRST_UID + number % UIDS
        self.fix = (
            f"{runtime.name} cannot make containers here; in a container it needs all that Docker's --privileged gives"
        )
        self._root = root
        self._container = f"{PREFIX}{os.getpid()}-{number}"
        self._bundles = root.folder / f"bundles-{number}"
        self._runtime = [runtime.name, f"--root={root.folder / 'containers'}", *runtime.options]
        if not runtime.knows_hybrid and (ROOT / "unified").is_mount():
            # It refuses a machine with both versions of control groups, so it does not get to see one of them.
            hide = f'umount {ROOT}/unified && exec "$@"'
            self._runtime = ["unshare", "--mount", "--propagation=private", "sh", "-c", hide, "sh", *self._runtime]

    def command(self, limits: Limits) -> Sequence[str]:
        """Raises OSError where the container's description cannot be written."""
        bundle = self._bundles / str(limits.file_bytes)
        if not bundle.exists():
            bundle.mkdir(parents=True)
            channel = 0 if self._kind.keeps_stdin else 3
            description = configuration(self._root, self.uid, limits, f"/{self._container}", channel)
            (bundle / "config.json").write_text(json.dumps(description))
        run = ["run", f"--bundle={bundle}", self._container]
        if self._kind.keeps_stdin:
            return [*self._runtime, *run]
        return [
            "sh",
            "-c",
            'exec 3<&0 </dev/null; exec "$@"',
            "sh",
            *self._runtime,
            run[0],
            "--preserve-fds=1",
            *run[1:],
        ]

    def clean_up(self) -> None:
        """After a run that failed: a container may be left, and would be in the way of the next one."""
        subprocess.run(
            [*self._runtime, "delete", "--force", self._container],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=CLEAN_SECONDS,
        )


def configuration(root: Root, uid: int, limits: Limits, group: str, channel: int) -> dict[str, Any]:
    """The container as the OCI runtime specification describes one. channel: the descriptor of the judge's socket."""
    safe = ["nosuid", "nodev"]
    work = [*safe, f"size={limits.file_bytes}", "nr_inodes=4096", "mode=700", f"uid={uid}", f"gid={uid}"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": [*safe, "noexec", "hidepid=2"]},
        {"destination": WORK_DIRECTORY, "type": "tmpfs", "source": "tmpfs", "options": work},
        *(_bound(folder, ["ro", *safe]) for folder in root.folders),
        *(
            {"destination": folder, "type": "tmpfs", "source": "tmpfs", "options": ["ro", *safe, "size=4k"]}
            for folder in HIDDEN
            if Path(folder).is_dir()
        ),
        *(_bound(f"/dev/{name}", []) for name in DEVICES),
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": uid, "gid": uid},
            "args": [PYTHON, "-s", SUPERVISOR, str(channel), "mounted"],
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/",
            "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")},
            "noNewPrivileges": True,
        },
        "root": {"path": str(root.path), "readonly": True},
        "hostname": "cell",
        "mounts": mounts,
        "linux": {
            "cgroupsPath": group,
            "namespaces": [{"type": kind} for kind in NAMESPACES],
            "readonlyPaths": READ_ONLY_PATHS,
            "maskedPaths": MASKED_PATHS,
        },
    }


def _bound(path: str, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": path, "type": "bind", "source": path, "options": ["bind", *options]}
