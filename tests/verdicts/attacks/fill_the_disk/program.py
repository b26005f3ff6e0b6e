import os

print("ran", flush=True)
written = 0
try:
    with open("/tmp/big", "wb") as file:
        while written < 64 << 20:
            written += file.write(b"x" * (1 << 20))
            file.flush()
except OSError:
    pass
print("ESCAPED" if written >= 64 << 20 else "held")
