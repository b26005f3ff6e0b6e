import os

print("ran", flush=True)
try:
    kept = [os.dup(1) for _ in range(5000)]
    print("ESCAPED")
except OSError:
    print("held")
