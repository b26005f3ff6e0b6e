import ctypes
import os

print("ran", flush=True)
libc = ctypes.CDLL(None, use_errno=True)
for process in {os.getppid(), 1} - {os.getpid(), 0}:
    if libc.ptrace(16, process, 0, 0) == 0:
        print("ESCAPED by ptrace", process)
buffer = ctypes.create_string_buffer(8)


class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


mine = Piece(ctypes.addressof(buffer), 8)
if libc.process_vm_readv(os.getpid(), ctypes.byref(mine), 1, ctypes.byref(mine), 1, 0) >= 0:
    print("ESCAPED: process_vm_readv works")
print("done")
