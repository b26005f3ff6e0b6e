"""What happens inside a jail: a supervisor waits, and its child becomes the program.

Every back end runs this under the system's Python, with the standard library alone and nothing of the judge's memory: a
program can find all that its own process holds. It loads few modules, as a box pays for them at every run.
"""

import _signal  # type: ignore[import-not-found]  # `signal` takes as long to load as all of the above
import atexit
import builtins
import ctypes
import io
import os
import resource
import select
import sys

PYTHON, WORK = "/usr/bin/python3", "/tmp"
LIBC = ctypes.CDLL(None, use_errno=True)

NO_SETUID, NO_DEVICES, NO_EXEC = 2, 4, 8
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
LAST_CAPABILITY = 63
MOST_NAMES = 4096
SIGINT, SIGKILL, SIGCHLD = 2, 9, 17
EVERYTHING_BUT_KILL_AND_STOP = [number for number in range(1, 65) if number not in (9, 19, 32, 33)]
COULD_NOT_EXECUTE = 127
STARTED = b'{"started": true}'

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` is not worth its time either
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn


class FilterProgram(ctypes.Structure):
    """The kernel's struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


class Request:
    """One run, as the judge asked for it. limits: the fields of `Limits` that hold here, in its units.

    descriptors: standard input, output and error, one file a name, and the files by which a process joins the run's
    control group.
    """

    def __init__(
        self,
        arguments: "Sequence[str]",
        names: "Sequence[str]",
        limits: "Mapping[str, float]",
        descriptors: "Sequence[int]",
    ) -> None:
        self.arguments, self.names, self.limits, self.descriptors = arguments, names, limits, descriptors


def checked(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    result = LIBC.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    checked(result, f"mount {target}")


def mount_work(file_bytes: float, uid: int) -> None:
    """A fresh work directory. Whatever is in it counts as memory of the run."""
    options = f"size={int(file_bytes)},nr_inodes={MOST_NAMES},mode=700,uid={uid},gid={uid}"
    mount("tmpfs", WORK, "tmpfs", NO_SETUID | NO_DEVICES, options)


def drop_bounding_set() -> None:
    for capability in range(LAST_CAPABILITY + 1):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for those this kernel does not have


def supervise(channel: int, request: Request, confine: "Callable[[], object]") -> "NoReturn":
    """As process 1 of the run: fork the program, report how it ended. Its own end is the end of all of them.

    channel: a SEQPACKET socket to the judge. confine: gives up, in the program's process, what it must not have.
    """
    # A signal that process 1 does not handle is not delivered to it, and the program may be of the same user.
    _signal.signal(SIGINT, _signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        _signal.signal(SIGINT, _signal.default_int_handler)
        become_program(channel, request, confine)
    for descriptor in request.descriptors:
        os.close(descriptor)
    status = wait(channel, program)
    kill_the_others()
    if status is not None:
        os.write(channel, b'{"status": %d}' % status)
    os._exit(0)


def wait(channel: int, program: int) -> "int | None":
    """The program's wait status, and None when the judge is gone. Reaps orphans meanwhile."""
    ready, wake = os.pipe()
    os.set_blocking(wake, False)
    _signal.signal(SIGCHLD, lambda *_: None)
    _signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(channel, 0)  # nothing but the end of it
    poll.register(ready, select.POLLIN)
    while True:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return None
            if process == program:
                return status
            if process == 0:
                break
        if any(descriptor == channel for descriptor, _ in poll.poll()):
            return None
        os.read(ready, 4096)


def kill_the_others() -> None:
    """Whatever the program started and left; afterwards nobody holds its output open."""
    try:
        os.kill(-1, SIGKILL)
        while True:
            os.waitpid(-1, 0)
    except (ProcessLookupError, ChildProcessError):  # nobody is there, or no longer
        return


def become_program(channel: int, request: Request, confine: "Callable[[], object]") -> "NoReturn":
    """Give up every right, then run the program in this process."""
    try:
        names, descriptors = request.names, request.descriptors
        for group in descriptors[3 + len(names) :]:
            os.write(group, b"0")
        for number in range(3):
            os.dup2(descriptors[number], number)
        os.setsid()
        set_limits(request.limits)
        confine()
        # A supervisor, or a change of user, has made its own /proc files root's, and so /dev/stdin too.
        checked(LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")
        os.chdir(WORK)
        for name, descriptor in zip(names, descriptors[3 : 3 + len(names)], strict=True):
            copy_file(descriptor, name)
        os.write(channel, STARTED)
        os.closerange(3, 1 << 16)
    except BaseException as error:  # noqa: BLE001 - reported, and nothing of the program has run
        os.write(channel, b'{"fault": "%s"}' % plain(f"the program's process: {type(error).__name__}: {error}"))
        os._exit(1)
    arguments = request.arguments
    if arguments[0] == PYTHON and len(arguments) > 1 and arguments[1] in names:
        run_script(arguments[1:])
    for number in EVERYTHING_BUT_KILL_AND_STOP:
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execve(arguments[0], list(arguments), os.environ)
    except OSError as error:
        os.write(2, f"{arguments[0]}: {error.strerror}\n".encode())
    os._exit(COULD_NOT_EXECUTE)


def plain(text: str) -> bytes:
    """`text` as the inside of a JSON string."""
    return bytes(letter if 32 <= letter < 127 and letter not in b'"\\' else 63 for letter in text.encode())


def set_limits(limits: "Mapping[str, float]") -> None:
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_STACK, limits["stack_bytes"]),
        # One process alone; the judge counts them all and is first.
        (resource.RLIMIT_CPU, limits["cpu_seconds"] + 2),
    ):
        resource.setrlimit(which, (int(value), int(value)))


def copy_file(descriptor: int, name: str) -> None:
    target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o500)
    while data := os.read(descriptor, 1 << 20):
        while data:
            data = data[os.write(target, data) :]
    os.close(target)


def install_filter(seccomp: bytes) -> None:
    program = FilterProgram(len(seccomp) // 8, seccomp)
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    checked(LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "system-call filter")


def run_script(arguments: "Sequence[str]") -> "NoReturn":
    """What `python3 NAME ...` does, without its start. The exit code is 1 unless the script ran to its end."""
    code = 1
    try:
        path = f"{WORK}/{arguments[0]}"
        open_streams()
        sys.argv = [path, *arguments[1:]]
        sys.path.insert(0, WORK)
        module = type(sys)("__main__")
        module.__dict__.update(__builtins__=builtins, __file__=path)
        sys.modules["__main__"] = module
        code = exit_code_of(path, module.__dict__)
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # as at the end of any Python: wait for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - a program may leave anything behind; it has not ended well
        code = code or 120
    finally:
        os._exit(code)


def open_streams() -> None:
    stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    for name, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def exit_code_of(path: str, namespace: "dict[str, Any]") -> int:
    try:
        with io.open_code(path) as file:
            source = file.read()
        exec(compile(source, path, "exec"), namespace)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - what a program raises is its own affair
        traceback = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return 1
    return 0
