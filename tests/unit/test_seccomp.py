"""The filter, run instruction by instruction as the kernel would."""

from errno import ENOSYS, ENOTTY, EPERM

import pytest
from gppo_verifiers.sandbox import seccomp
from gppo_verifiers.sandbox.base import IsolationError
from gppo_verifiers.sandbox.seccomp import ALLOW, ALLOWED, AUDIT_ARCH_X86_64, ERROR, KILL, filter_program, steps

REFUSED = {
    "ptrace": 101,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "pidfd_getfd": 438,
    "kcmp": 312,
    "mount": 165,
    "umount2": 166,
    "pivot_root": 155,
    "chroot": 161,
    "unshare": 272,
    "setns": 308,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "mount_setattr": 442,
    "bpf": 321,
    "perf_event_open": 298,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_by_handle_at": 304,
    "name_to_handle_at": 303,
    "init_module": 175,
    "finit_module": 313,
    "kexec_load": 246,
    "reboot": 169,
    "swapon": 167,
    "syslog": 103,
    "iopl": 172,
    "ioperm": 173,
    "settimeofday": 164,
    "clock_settime": 227,
    "personality": 135,
    "setuid": 105,
    "setgid": 106,
    "mknod": 133,
    "mknodat": 259,
    "splice": 275,
    "vmsplice": 278,
    "modify_ldt": 154,
    "mbind": 237,
    "move_pages": 279,
    "landlock_create_ruleset": 444,
    "memfd_secret": 447,
}


def decide(number, arguments=(), architecture=AUDIT_ARCH_X86_64):
    """The filter's return value."""
    data = {0: number, 4: architecture} | {16 + 8 * place: value for place, value in enumerate(arguments)}
    program, place, accumulator = steps(), 0, 0
    while True:
        step = program[place]
        place += 1
        match step.code:
            case seccomp.LOAD:
                accumulator = data[step.value]
            case seccomp.RETURN:
                return step.value
            case seccomp.EQUAL:
                place += step.yes if accumulator == step.value else step.no
            case seccomp.AT_LEAST:
                place += step.yes if accumulator >= step.value else step.no
            case seccomp.GREATER:
                place += step.yes if accumulator > step.value else step.no
            case seccomp.ANY_BIT:
                place += step.yes if accumulator & step.value else step.no
            case _:
                raise AssertionError(f"no such instruction: {step}")


def test_exactly_the_listed_calls_are_allowed_without_a_look_at_their_arguments():
    sockets = {seccomp.SOCKET, seccomp.SOCKETPAIR}
    by_arguments = sockets | {
        seccomp.MMAP,
        seccomp.MEMFD_CREATE,
        seccomp.CLONE,
        seccomp.CLONE3,
        seccomp.IOCTL,
        seccomp.PRCTL,
        seccomp.PRLIMIT64,
    }
    numbers = set(range(600)) - by_arguments
    assert {number for number in numbers if decide(number) == ALLOW} == set(ALLOWED.values())


def test_a_number_stands_in_the_list_once():
    assert len(set(ALLOWED.values())) == len(ALLOWED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_dangerous_call_is_refused(name):
    assert name not in ALLOWED
    assert decide(REFUSED[name]) == ERROR | EPERM


def test_a_call_newer_than_the_list_does_not_exist():
    assert decide(seccomp.LAST_KNOWN + 1) == ERROR | ENOSYS


def test_another_architecture_and_the_x32_numbers_are_no_way_round():
    assert decide(0, architecture=0x40000003) == KILL  # 32-bit x86
    assert decide(0x40000000 | ALLOWED["read"]) == ERROR | EPERM


@pytest.mark.parametrize(
    ("number", "arguments", "verdict"),
    [
        (seccomp.CLONE, [17], ALLOW),  # fork: SIGCHLD
        (seccomp.CLONE, [0x3D0F00], ALLOW),  # a thread
        (seccomp.CLONE, [0x00020000], ERROR | EPERM),
        (seccomp.CLONE, [0x10000000 | 17], ERROR | EPERM),
        (seccomp.CLONE, [0x40000000], ERROR | EPERM),
        (seccomp.CLONE3, [0], ERROR | ENOSYS),
        (seccomp.MMAP, [0, 4096, 3, 0x22], ALLOW),
        (seccomp.MMAP, [0, 1 << 21, 3, 0x40022], ERROR | EPERM),  # huge pages, which no limit counts
        (seccomp.MEMFD_CREATE, [0, 3], ALLOW),
        (seccomp.MEMFD_CREATE, [0, 4], ERROR | EPERM),
        (seccomp.SOCKET, [1], ALLOW),
        (seccomp.SOCKET, [2], ERROR | EPERM),  # IPv4
        (seccomp.SOCKET, [10], ERROR | EPERM),  # IPv6
        (seccomp.SOCKET, [16], ERROR | EPERM),  # netlink
        (seccomp.SOCKETPAIR, [1], ALLOW),
        (seccomp.IOCTL, [0, 0x5401], ALLOW),  # is it a terminal?
        (seccomp.IOCTL, [0, 0x5412], ERROR | ENOTTY),  # TIOCSTI: type into the terminal
        (seccomp.PRCTL, [15], ALLOW),
        (seccomp.PRCTL, [35], ERROR | EPERM),  # SET_MM
        (seccomp.PRCTL, [0x59616D61], ERROR | EPERM),  # SET_PTRACER
        (seccomp.PRLIMIT64, [0], ALLOW),  # its own
        (seccomp.PRLIMIT64, [1], ERROR | EPERM),  # its supervisor's
    ],
)
def test_calls_that_depend_on_an_argument(number, arguments, verdict):
    assert decide(number, arguments) == verdict


def test_the_program_is_the_steps_in_the_kernels_form():
    program = filter_program()
    assert len(program) == 8 * len(steps()) < 8 * 4096
    assert program[:8] == bytes([0x20, 0, 0, 0, 4, 0, 0, 0])


def test_another_machine_is_refused(monkeypatch):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "aarch64")
    with pytest.raises(IsolationError, match="aarch64"):
        filter_program()
