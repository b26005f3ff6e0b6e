"""The fork server of one cell: a Python that is already there, inside the jail, and forks for each run.

Runs as a script under the system's Python, as root. Talks over one SEQPACKET socket, JSON a packet, descriptors beside.

    judge -> server   {"uid", "filter", "preload"}                                      once; answered by {"ready"}
    judge -> server   {"arguments", "names", "limits"} + stdin, stdout, stderr, one file a name, cgroup.procs files
    server -> judge   {"started"} once the program is about to run, then {"status"}, a wait status; or {"fault"}

A run is two processes. The supervisor, process 1 of a new PID namespace, stays root, holds the socket and reaps; when
it ends for whatever reason, the kernel kills all others. The program is its child, and cannot signal or trace it.
"""

import array
import gc
import importlib
import json
import os
import socket
import sys
from typing import Any, NoReturn

from gppo_inside import (  # type: ignore[import-not-found]  # beside this file
    LIBC,
    NO_DEVICES,
    NO_EXEC,
    NO_SETUID,
    WORK,
    Request,
    checked,
    drop_bounding_set,
    install_filter,
    mount,
    mount_work,
    supervise,
)

NEW_MOUNTS, NEW_CGROUPS, NEW_UTS, NEW_IPC, NEW_PIDS, NEW_NETWORK = (
    0x00020000,
    0x02000000,
    0x04000000,
    0x08000000,
    0x20000000,
    0x40000000,
)
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18
DETACH = 2
PIVOT_ROOT = 155

DEVICES = ("null", "zero", "full", "random", "urandom")
READABLE = ("bin", "sbin", "lib", "lib64", "lib32")
HIDDEN = ("usr/local", "usr/src")
"""Not of the system: the judge itself may be installed there."""


def bind(source: str, target: str) -> None:
    """`source`, without what is mounted below it, for reading."""
    mount(source, target, flags=BIND)
    mount("none", target, flags=BIND | REMOUNT | READ_ONLY | NO_SETUID | NO_DEVICES)


def build_jail(root: str) -> None:
    """Leave the machine: namespaces of its own, and a root of read-only system folders built over `root`."""
    flags = NEW_MOUNTS | NEW_CGROUPS | NEW_UTS | NEW_IPC | NEW_NETWORK
    checked(LIBC.unshare(flags), "new namespaces")
    mount("none", "/", flags=RECURSIVE | PRIVATE)
    mount("tmpfs", root, "tmpfs", NO_SETUID, "size=1m,mode=755")
    for name in ("usr", "proc", "dev", "tmp", "etc", "old"):
        os.mkdir(f"{root}/{name}")
    bind_system(root)
    with open(f"{root}/etc/passwd", "w") as passwd:
        passwd.write("nobody:x:65534:65534::/tmp:/bin/sh\n")
    for name in DEVICES:
        with open(f"{root}/dev/{name}", "w"):
            mount(f"/dev/{name}", f"{root}/dev/{name}", flags=BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    os.symlink(WORK, f"{root}/dev/shm")
    checked(LIBC.syscall(PIVOT_ROOT, root.encode(), f"{root}/old".encode()), "pivot_root")
    os.chdir("/")
    checked(LIBC.umount2(b"/old", DETACH), "unmount the old root")
    os.rmdir("/old")
    mount("none", "/", flags=BIND | REMOUNT | READ_ONLY | NO_SETUID | NO_DEVICES)
    checked(LIBC.sethostname(b"cell", 4), "host name")
    drop_bounding_set()


def bind_system(root: str) -> None:
    """Programs and libraries, without what does not belong to the system."""
    bind("/usr", f"{root}/usr")
    for name in READABLE:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
            bind(f"/{name}", f"{root}/{name}")
    for name in HIDDEN:
        if os.path.isdir(f"{root}/{name}"):
            mount("tmpfs", f"{root}/{name}", "tmpfs", READ_ONLY | NO_SETUID | NO_DEVICES, "size=4k,mode=755")
    if os.path.isdir("/etc/alternatives"):
        os.mkdir(f"{root}/etc/alternatives")
        bind("/etc/alternatives", f"{root}/etc/alternatives")


def serve(channel: socket.socket, own_pids: int, uid: int, seccomp: bytes) -> NoReturn:
    """Fork a supervisor for every request until the judge closes the socket. own_pids: the server's PID namespace."""
    gc.collect()
    gc.freeze()  # a collection in a child must not touch, and so copy, every page
    while True:
        packet, ancillary, _, _ = channel.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 64))
        if not packet:
            os._exit(0)
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data[: len(data) - len(data) % 4])
        checked(LIBC.unshare(NEW_PIDS), "new PID namespace")
        supervisor = os.fork()
        if supervisor == 0:
            os.close(own_pids)
            begin(channel, json.loads(packet), list(descriptors), uid, seccomp)
        checked(LIBC.setns(own_pids, NEW_PIDS), "own PID namespace")
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(supervisor, 0)
        if status != 0:
            send(channel, {"fault": f"the supervisor ended with wait status {status}"})


def begin(channel: socket.socket, request: Any, descriptors: "list[int]", uid: int, seccomp: bytes) -> NoReturn:
    """Process 1 of the run: prepare, then supervise it."""

    def confine() -> None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        install_filter(seccomp)

    try:
        # The IPC namespace is the cell's: the filter lets no run make anything that would stay in it.
        checked(LIBC.unshare(NEW_MOUNTS), "new mount namespace")
        mount("proc", "/proc", "proc", NO_SETUID | NO_DEVICES | NO_EXEC, "hidepid=2")
        mount_work(request["limits"]["file_bytes"], uid)
        run = Request(request["arguments"], request["names"], request["limits"], descriptors)
        supervise(channel.fileno(), run, confine)
    except Exception as error:  # noqa: BLE001 - the judge is told, whatever it is
        send(channel, {"fault": f"{type(error).__name__}: {error}"})
    os._exit(0)


def send(channel: socket.socket, message: object) -> None:
    channel.send(json.dumps(message).encode())


def channel_of(argument: str) -> socket.socket:
    """The socket to the judge: a descriptor's number, or the path where the judge listens."""
    if argument.isdecimal():
        channel = socket.socket(fileno=int(argument))
        channel.set_inheritable(False)
        return channel
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(argument)
    return channel


def main(argument: str) -> NoReturn:
    channel = channel_of(argument)
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    try:
        request = json.loads(channel.recv(1 << 16))
        for name in request["preload"]:
            importlib.import_module(name)
        own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY)
        build_jail(WORK)
        send(channel, {"ready": True})
        serve(channel, own_pids, request["uid"], bytes.fromhex(request["filter"]))
    except Exception as error:  # noqa: BLE001 - the judge is told, whatever it is
        send(channel, {"fault": f"{type(error).__name__}: {error}"})
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
