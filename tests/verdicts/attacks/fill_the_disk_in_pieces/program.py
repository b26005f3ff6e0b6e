import os

print("ran", flush=True)
written = 0
try:
    for number in range(64):
        with open(f"/tmp/{number}", "wb") as file:
            written += file.write(b"x" * (1 << 20))
except OSError:
    pass
print("ESCAPED" if written >= 64 << 20 else "held")
