import ctypes
import mmap

print("ran", flush=True)
block = mmap.mmap(-1, 1 << 30)
block.madvise(mmap.MADV_HUGEPAGE)
for place in range(0, 1 << 30, 4096):
    block[place] = 1
print("ESCAPED")
