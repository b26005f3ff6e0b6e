import ctypes
import errno

print("ran", flush=True)
libc = ctypes.CDLL(None, use_errno=True)
CALLS = {
    "bpf": 321, "perf_event_open": 298, "add_key": 248, "request_key": 249, "keyctl": 250, "userfaultfd": 323,
    "io_uring_setup": 425, "kexec_load": 246, "init_module": 175, "finit_module": 313, "open_by_handle_at": 304,
    "name_to_handle_at": 303, "pidfd_getfd": 438, "kcmp": 312, "vmsplice": 278, "modify_ldt": 154, "setns": 308,
    "fsopen": 430, "open_tree": 428, "move_mount": 429, "pivot_root": 155, "chroot": 161, "swapon": 167,
    "reboot": 169, "syslog": 103, "acct": 163, "quotactl": 179, "iopl": 172, "ioperm": 173, "settimeofday": 164,
    "personality": 135, "mbind": 237, "move_pages": 279, "fanotify_init": 300,
}
for name, number in CALLS.items():
    result = libc.syscall(number, 0, 0, 0, 0, 0)
    error = ctypes.get_errno()
    if result != -1 or error not in (errno.EPERM, errno.ENOSYS):
        print("ESCAPED", name, result, error)
print("done")
