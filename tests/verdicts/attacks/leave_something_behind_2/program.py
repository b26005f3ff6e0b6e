import os

print("ran", flush=True)
found = [path for path in ("/tmp/left", "/dev/shm/left") if os.path.exists(path)]
print("ESCAPED" if found else "held", found, os.listdir("/tmp"))
