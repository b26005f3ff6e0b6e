import ctypes
import errno

MAP_HUGETLB, MFD_HUGETLB = 0x40000, 0x4
print("ran", flush=True)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
place = libc.mmap(None, ctypes.c_size_t(2 << 20), 3, 0x22 | MAP_HUGETLB, -1, 0)
if place != ctypes.c_void_p(-1).value or ctypes.get_errno() != errno.EPERM:
    print("ESCAPED mmap", place, ctypes.get_errno())
if libc.memfd_create(b"x", MFD_HUGETLB) != -1 or ctypes.get_errno() != errno.EPERM:
    print("ESCAPED memfd_create", ctypes.get_errno())
print("done")
