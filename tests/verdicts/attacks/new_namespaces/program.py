import ctypes
import os

print("ran", flush=True)
libc = ctypes.CDLL(None, use_errno=True)
for name, flag in {"user": 0x10000000, "mount": 0x00020000, "net": 0x40000000, "pid": 0x20000000}.items():
    if libc.unshare(flag) == 0:
        print("ESCAPED", name)
child = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
if child > 0:
    print("ESCAPED by clone")
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0:
    print("ESCAPED by mount")
print("done")
