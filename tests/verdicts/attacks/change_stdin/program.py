import os

print("ran", flush=True)
try:
    writer = os.open("/proc/self/fd/0", os.O_RDWR)
    os.write(writer, b"changed")
    print("ESCAPED")
except OSError:
    print("held")
