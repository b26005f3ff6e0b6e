"""Process 1 of a box: takes one run over a socket that it was started with, and supervises it.

Runs as a script under the system's Python, as the program's user, where the box has been made already. It differs from
the program in that it cannot be traced and holds the socket to the judge, a SEQPACKET one:

    judge -> box   the fields of `request_of` + stdin, stdout, stderr, one file a name, cgroup.procs files
    box -> judge   {"started"} once the program is about to run, then {"status"}, a wait status; or {"fault"}

Its arguments are the socket's descriptor and `mounted`, or `mount` where the work directory is still to be mounted,
with the rights given for this alone.
"""

import _socket
import ctypes
import os
import sys

from gppo_inside import (  # type: ignore[import-not-found]  # beside this file
    LIBC,
    PR_SET_DUMPABLE,
    Request,
    checked,
    drop_bounding_set,
    install_filter,
    mount_work,
    plain,
    supervise,
)

NEW_MOUNTS = 0x00020000
CAPABILITIES_VERSION_3 = 0x20080522
MOST_DESCRIPTORS = 64


def request_of(packet: bytes, descriptors: "list[int]") -> "tuple[Request, bytes]":
    """The run and its system-call filter: texts divided by zero bytes, which no argument can have in it.

    The filter in hexadecimal, the number of arguments, the arguments, the number of names, the names, then limits by
    turns with their values.
    """
    fields = iter(os.fsdecode(packet).split("\0"))
    seccomp = bytes.fromhex(next(fields))
    arguments = [next(fields) for _ in range(int(next(fields)))]
    names = [next(fields) for _ in range(int(next(fields)))]
    limits = {name: float(next(fields)) for name in fields}
    return Request(arguments, names, limits, descriptors), seccomp


def receive(channel: int) -> "tuple[bytes, list[int]]":
    with_rights = _socket.socket(fileno=channel)
    packet, ancillary, _, _ = with_rights.recvmsg(1 << 16, _socket.CMSG_SPACE(4 * MOST_DESCRIPTORS))
    with_rights.detach()
    data = b"".join(data for _, _, data in ancillary)
    return packet, [int.from_bytes(data[place : place + 4], sys.byteorder) for place in range(0, len(data), 4)]


def drop_rights() -> None:
    """What was needed to mount the work directory."""
    drop_bounding_set()
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION_3, 0)
    checked(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "drop capabilities")


def main(inherited: int, to_mount: bool) -> None:
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    os.environ.pop("PWD", None)  # bwrap's own addition
    channel = os.dup(inherited)
    os.close(inherited)
    try:
        packet, descriptors = receive(channel)
        if not packet:  # the judge has changed its mind
            return
        request, seccomp = request_of(packet, descriptors)
        if to_mount:
            checked(LIBC.unshare(NEW_MOUNTS), "new mount namespace")
            mount_work(request.limits["file_bytes"], os.getuid())
            drop_rights()
        checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "not dumpable")
        install_filter(seccomp)
        supervise(channel, request, lambda: None)
    except Exception as error:  # noqa: BLE001 - the judge is told, whatever it is
        os.write(channel, b'{"fault": "%s"}' % plain(f"the box: {type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "mount")
