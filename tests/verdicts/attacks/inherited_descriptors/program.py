import os

print("ran", flush=True)
open_ones = [descriptor for descriptor in range(3, 1000) if os.path.exists(f"/proc/self/fd/{descriptor}")]
print("ESCAPED" if open_ones else "held", open_ones)
