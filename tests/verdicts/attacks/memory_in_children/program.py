import os
import time

print("ran", flush=True)
for _ in range(8):
    if os.fork() == 0:
        data = b"x" * (200 << 20)
        time.sleep(30)
        os._exit(0)
time.sleep(3)
alive = sum(os.waitpid(-1, os.WNOHANG)[0] == 0 for _ in range(8))
print("ESCAPED" if alive == 8 else "held")
