"""The system calls a program may make, as a list of what is allowed: anything else is refused.

The list holds what Python, g++ and ordinary programs need for files, memory, processes, threads and local sockets.
Not on it: new namespaces, mounts, tracing, other processes' memory or limits, keys, BPF, io_uring, network sockets,
devices.
"""

import platform
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from errno import ENOSYS, ENOTTY, EPERM

from gppo_verifiers.sandbox.base import IsolationError

# fmt: off
ALLOWED: Mapping[str, int] = {
    # files
    "read": 0, "write": 1, "open": 2, "openat": 257, "creat": 85, "close": 3, "close_range": 436, "stat": 4, "fstat":
    5, "lstat": 6, "newfstatat": 262, "statx": 332, "statfs": 137, "fstatfs": 138, "lseek": 8, "pread64": 17,
    "pwrite64": 18, "readv": 19, "writev": 20, "preadv": 295, "pwritev": 296, "preadv2": 327, "pwritev2": 328,
    "access": 21, "faccessat": 269, "faccessat2": 439, "dup": 32, "dup2": 33, "dup3": 292, "pipe": 22, "pipe2": 293,
    "fcntl": 72, "flock": 73, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "fallocate": 285,
    "getdents": 78, "getdents64": 217, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "renameat": 264,
    "renameat2": 316, "mkdir": 83, "mkdirat": 258, "rmdir": 84, "link": 86, "linkat": 265, "unlink": 87, "unlinkat":
    263, "symlink": 88, "symlinkat": 266, "readlink": 89, "readlinkat": 267, "chmod": 90, "fchmod": 91, "fchmodat":
    268, "umask": 95, "utime": 132, "utimes": 235, "utimensat": 280, "futimesat": 261, "fadvise64": 221, "readahead":
    187, "sendfile": 40, "copy_file_range": 326, "getxattr": 191, "lgetxattr": 192, "fgetxattr": 193, "listxattr":
    194, "llistxattr": 195, "flistxattr": 196, 
    # waiting
    "select": 23, "pselect6": 270, "poll": 7, "ppoll": 271, "epoll_create": 213, "epoll_create1": 291, "epoll_ctl":
    233, "epoll_wait": 232, "epoll_pwait": 281, "epoll_pwait2": 441, "eventfd": 284, "eventfd2": 290, "signalfd": 282,
    "signalfd4": 289, "timerfd_create": 283, "timerfd_settime": 286, "timerfd_gettime": 287, "nanosleep": 35,
    "clock_nanosleep": 230, "pause": 34,
    # memory
    "mprotect": 10, "munmap": 11, "mremap": 25, "madvise": 28, "brk": 12, "mincore": 27, "msync": 26,
    "mlock": 149, "mlock2": 325, "munlock": 150, "mlockall": 151, "munlockall": 152, "membarrier": 324,
    # processes
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "exit": 60, "exit_group": 231, "wait4": 61, "waitid": 247,
    "kill": 62, "tkill": 200, "tgkill": 234, "pidfd_open": 434, "pidfd_send_signal": 424, "getpid": 39, "getppid":
    110, "gettid": 186, "getpgrp": 111, "getpgid": 121, "setpgid": 109, "getsid": 124, "setsid": 112, "getuid": 102,
    "geteuid": 107, "getgid": 104, "getegid": 108, "getresuid": 118, "getresgid": 120, "getgroups": 115, "capget":
    125, "futex": 202, "set_robust_list": 273, "get_robust_list": 274, "rseq": 334, "set_tid_address": 218,
    "arch_prctl": 158, "sched_yield": 24, "sched_getaffinity": 204, "sched_getparam": 143, "sched_getscheduler": 145,
    "sched_get_priority_max": 146, "sched_get_priority_min": 147, "sched_rr_get_interval": 148, "getpriority": 140,
    "getrlimit": 97, "setrlimit": 160, "getrusage": 98,
    # time
    "times": 100, "time": 201, "gettimeofday": 96, "clock_gettime": 228, "clock_getres": 229, "getitimer": 36,
    "setitimer": 38, "alarm": 37, "timer_create": 222, "timer_settime": 223, "timer_gettime": 224, "timer_getoverrun":
    225, "timer_delete": 226, "getrandom": 318, "getcpu": 309, "sysinfo": 99, "uname": 63,
    # signals
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "restart_syscall": 219,
    # sockets
    "bind": 49, "connect": 42, "listen": 50, "accept": 43, "accept4": 288, "getsockname": 51, "getpeername": 52,
    "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "setsockopt": 54, "getsockopt": 55,
}
"""Allowed whatever their arguments: name to number on x86-64."""
# fmt: on

CLONE, CLONE3, SOCKET, SOCKETPAIR, IOCTL, PRCTL, PRLIMIT64 = 56, 435, 41, 53, 16, 157, 302
NEW_NAMESPACES = 0x7E020000 | 0x00000080
"""Every CLONE_NEW... flag: time, mount, cgroup, UTS, IPC, user, process, network."""
MMAP, MEMFD_CREATE = 9, 319
MAP_HUGETLB, MFD_HUGETLB = 0x40000, 0x4
"""Such pages do not count as a control group's memory."""
LAST_KNOWN = 462
"""Calls above this number are newer than the list; programs are told that the kernel does not have them."""
AF_UNIX = 1
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
PRCTLS = (1, 2, 3, 4, 15, 16, 21, 23, 30, 38, 39)
"""PDEATHSIG, DUMPABLE and NAME (set, get); get SECCOMP, CAPBSET and TIMERSLACK; NO_NEW_PRIVS (set, get)."""

LOAD, EQUAL, AT_LEAST, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06
AUDIT_ARCH_X86_64 = 0xC000003E
X32 = 0x40000000
KILL, ERROR, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16


@dataclass(frozen=True)
class Step:
    """One BPF instruction; yes and no count the instructions to skip."""

    code: int
    value: int
    yes: int = 0
    no: int = 0


def filter_program() -> bytes:
    """The filter as an array of `struct sock_filter`. Raises IsolationError on another architecture than x86-64."""
    if platform.machine() != "x86_64":
        raise IsolationError(f"the system-call filter is made for x86-64 alone, not for {platform.machine()}")
    return b"".join(struct.pack("=HBBI", step.code, step.yes, step.no, step.value) for step in steps())


def steps() -> list[Step]:
    """The filter, instruction by instruction."""
    return [
        Step(LOAD, ARCHITECTURE_OFFSET),
        Step(EQUAL, AUDIT_ARCH_X86_64, yes=1),
        Step(RETURN, KILL),
        Step(LOAD, NUMBER_OFFSET),
        Step(AT_LEAST, X32, no=1),
        Step(RETURN, ERROR | EPERM),
        *_argument_is(SOCKET, 0, (AF_UNIX,), EPERM),
        *_argument_is(SOCKETPAIR, 0, (AF_UNIX,), EPERM),
        *_argument_is(IOCTL, 1, IOCTLS, ENOTTY),
        *_argument_is(PRCTL, 0, PRCTLS, EPERM),
        *_argument_is(PRLIMIT64, 0, (0,), EPERM),  # its own limits, not those of its supervisor
        *_argument_lacks(CLONE, 0, NEW_NAMESPACES),
        *_argument_lacks(MMAP, 3, MAP_HUGETLB),
        *_argument_lacks(MEMFD_CREATE, 1, MFD_HUGETLB),
        Step(EQUAL, CLONE3, no=1),
        Step(RETURN, ERROR | ENOSYS),  # its flags lie in memory, which a filter cannot read; libc then uses clone
        *(step for first, last in _ranges(ALLOWED.values()) for step in _between(first, last)),
        Step(GREATER, LAST_KNOWN, no=1),
        Step(RETURN, ERROR | ENOSYS),
        Step(RETURN, ERROR | EPERM),
    ]


def _argument_is(number: int, argument: int, values: Iterable[int], error: int) -> Iterator[Step]:
    """Allow call `number` where the low half of its argument is one of `values`, else fail it with `error`."""
    values = list(values)
    yield Step(EQUAL, number, no=2 * len(values) + 2)
    yield Step(LOAD, ARGUMENTS_OFFSET + 8 * argument)
    for value in values:
        yield Step(EQUAL, value, no=1)
        yield Step(RETURN, ALLOW)
    yield Step(RETURN, ERROR | error)


def _argument_lacks(number: int, argument: int, bits: int) -> Iterator[Step]:
    """Allow call `number` where the low half of its argument has none of `bits`."""
    yield Step(EQUAL, number, no=4)
    yield Step(LOAD, ARGUMENTS_OFFSET + 8 * argument)
    yield Step(ANY_BIT, bits, no=1)
    yield Step(RETURN, ERROR | EPERM)
    yield Step(RETURN, ALLOW)


def _between(first: int, last: int) -> Iterator[Step]:
    yield Step(AT_LEAST, first, no=2)
    yield Step(GREATER, last, yes=1)
    yield Step(RETURN, ALLOW)


def _ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers, as (first, last)."""
    first = last = -2
    for number in sorted(numbers):
        if number != last + 1:
            if first >= 0:
                yield first, last
            first = number
        last = number
    yield first, last
