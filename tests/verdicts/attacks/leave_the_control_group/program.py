import os

print("ran", flush=True)
found = [path for path in ("/sys/fs/cgroup", "/sys") if os.path.isdir(path) and os.listdir(path)]
print("ESCAPED" if found else "held", found)
