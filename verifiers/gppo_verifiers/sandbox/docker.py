"""The Docker back end: a container a cell, which stays, and in it the fork server.

The container is the outer wall: no network, a read-only root, no rights but those by which the fork server makes the
inner one, which is that of the zygote back end. The server connects to a socket in a folder of its own.
"""

import io
import os
import socket
import sys
import tarfile
from contextlib import suppress
from itertools import count
from typing import Any

from gppo_verifiers.sandbox.base import ENVIRONMENT, PYTHON, Cell, IsolationError
from gppo_verifiers.sandbox.cgroups import PREFIX, open_hierarchy
from gppo_verifiers.sandbox.engine import Engine
from gppo_verifiers.sandbox.roots import SERVER, Root
from gppo_verifiers.sandbox.seccomp import filter_program
from gppo_verifiers.sandbox.zygote import Started, ZygoteCell

FIRST_UID, UIDS = 65_600, 1000
CONNECT_SECONDS = 120.0
CHANNEL = "/channel"
RIGHTS = ("SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "KILL")
"""Of the fork server: to make namespaces and mounts, to become the program's user, to give rights up, to end a run."""
SERVER_MEMORY_BYTES = 1 << 30
"""Of the server alone: a run is in its own control group."""


class DockerSandbox:
    """Implements `Sandbox`. The engine must be this machine's: descriptors are handed into its containers."""

    name = "docker"

    def __init__(self) -> None:
        if sys.platform != "linux" or os.geteuid() != 0:
            raise IsolationError("the docker sandbox needs Linux and root, to make control groups")
        self._filter = filter_program()
        self._numbers = count()
        self._engine = Engine()
        self._image = f"{PREFIX}{os.getpid()}-{os.urandom(4).hex()}:root"
        self._hierarchy = open_hierarchy()
        self._root = Root()
        try:
            self._engine.call("POST", f"/images/create?fromSrc=-&repo={self._image}", packed(self._root))
        except BaseException:
            self._root.close()
            self._hierarchy.close()
            raise

    def open_cell(self) -> Cell:
        number = next(self._numbers)
        container = Container(self._engine, self._image, self._root, number)
        return ZygoteCell(self._hierarchy, self._filter, FIRST_UID + number % UIDS, container.start)

    def close(self) -> None:
        self._hierarchy.close()
        self._root.close()
        with suppress(IsolationError):  # the engine may be gone, and its image is a few files
            self._engine.call("DELETE", f"/images/{self._image}")


class Container:
    """The container of one cell; a new one at every start."""

    def __init__(self, engine: Engine, image: str, root: Root, number: int) -> None:
        self._engine, self._image, self._root = engine, image, root
        self._folder = root.folder / f"channel-{number}"
        self._folder.mkdir(mode=0o700)

    def start(self) -> Started:
        """Raises IsolationError."""
        path = self._folder / "socket"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen(1)
            listener.settimeout(CONNECT_SECONDS)
            description = configuration(self._image, self._root, str(self._folder))
            name = self._engine.call("POST", "/containers/create", description)["Id"]
            try:
                self._engine.call("POST", f"/containers/{name}/start")
                channel, _ = listener.accept()
            except (OSError, IsolationError) as error:
                self._remove(name)
                raise IsolationError(f"a container of the judge does not start: {error}") from error
            finally:
                path.unlink()
        return Started(channel, lambda: self._remove(name))

    def _remove(self, name: str) -> None:
        """Returns when it is gone. Without an engine it goes by itself: its server ends with the channel."""
        for method, path in (("DELETE", "?force=true"), ("POST", "/wait?condition=removed")):
            with suppress(IsolationError):
                self._engine.call(method, f"/containers/{name}{path}")


def configuration(image: str, root: Root, channel: str) -> dict[str, Any]:
    """The container as the Engine API describes one."""
    folders = [f"{folder}:{folder}:ro" for folder in root.folders]
    return {
        "Image": image,
        "Cmd": [PYTHON, "-s", SERVER, f"{CHANNEL}/socket"],
        "User": "0:0",
        "Hostname": "cell",
        "WorkingDir": "/",
        "Env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
        "HostConfig": {
            "AutoRemove": True,
            "Binds": [*folders, f"{channel}:{CHANNEL}:ro"],
            "CapAdd": RIGHTS,
            "CapDrop": ["ALL"],
            "IpcMode": "private",
            "LogConfig": {"Type": "none"},
            "Memory": SERVER_MEMORY_BYTES,
            "NetworkMode": "none",
            "PidsLimit": 256,
            "ReadonlyRootfs": True,
            # The filter that Docker would set knows no new namespaces; programs get the judge's own.
            "SecurityOpt": ["no-new-privileges", "seccomp=unconfined", "apparmor=unconfined"],
        },
    }


def packed(root: Root) -> bytes:
    """The root folder as a tar file: the image."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(root.path, arcname=".")
    return file.getvalue()
