"""The bubblewrap back end: one unprivileged `bwrap` a run, in a user namespace of its own."""

import os
import shutil
import sys
from collections.abc import Sequence
from itertools import count

from gppo_verifiers.sandbox.base import ENVIRONMENT, PYTHON, Cell, IsolationError, Limits
from gppo_verifiers.sandbox.boxes import BoxCell
from gppo_verifiers.sandbox.cgroups import open_hierarchy
from gppo_verifiers.sandbox.roots import DEVICES, HIDDEN, SUPERVISOR, Root
from gppo_verifiers.sandbox.seccomp import filter_program

FIRST_UID, UIDS = 63_000, 1000
FIX = (
    "install it (Debian: apt install bubblewrap) and let users make namespaces: sysctl user.max_user_namespaces=10000, "
    "with Debian's kernel kernel.unprivileged_userns_clone=1, with Ubuntu's "
    "kernel.apparmor_restrict_unprivileged_userns=0, in a container its options seccomp=unconfined and "
    "systempaths=unconfined"
)


class BwrapSandbox:
    """Implements `Sandbox`. Root is needed for control groups alone: `bwrap` never has it, nor has its supervisor."""

    name = "bwrap"

    def __init__(self) -> None:
        if sys.platform != "linux" or os.geteuid() != 0:
            raise IsolationError("the bwrap sandbox needs Linux and root, to make control groups")
        for command in ("bwrap", "setpriv"):
            if shutil.which(command) is None:
                raise IsolationError(f"there is no {command}; {FIX}")
        self._filter = filter_program()
        self._numbers = count()
        self._root = Root()
        try:
            self._hierarchy = open_hierarchy()
        except BaseException:
            self._root.close()
            raise

    def open_cell(self) -> Cell:
        uid = FIRST_UID + next(self._numbers) % UIDS
        return BoxCell(self._hierarchy, BwrapLauncher(self._root, uid), self._filter)

    def close(self) -> None:
        self._hierarchy.close()
        self._root.close()


class BwrapLauncher:
    """Implements `Launcher`."""

    fix = FIX

    def __init__(self, root: Root, uid: int) -> None:
        self.uid = uid
        self._command = command(root, uid)

    def command(self, limits: Limits) -> Sequence[str]:
        return self._command

    def clean_up(self) -> None:
        """Nothing of a box outlives its command."""


def command(root: Root, uid: int) -> Sequence[str]:
    """The same for every run of a cell: the limits are the supervisor's affair."""
    mounts = ["--ro-bind", str(root.path), "/"]
    for folder in root.folders:
        mounts += ["--ro-bind", folder, folder]
    for folder in HIDDEN:
        if os.path.isdir(folder):
            mounts += ["--tmpfs", folder, "--remount-ro", folder]
    for name in DEVICES:
        mounts += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    environment = [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
    return [
        *("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"),
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"),
        *("--as-pid-1", "--hostname", "cell", "--uid", str(uid), "--gid", str(uid), "--clearenv", *environment),
        *(*mounts, "--proc", "/proc", "--chdir", "/"),
        # For the work directory, whose number of files bwrap cannot limit; given up before the program is there.
        *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP"),
        *(PYTHON, "-s", SUPERVISOR, "0", "mount"),
    ]
