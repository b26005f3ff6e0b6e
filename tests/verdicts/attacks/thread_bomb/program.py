import os
import threading
import time

print("ran", flush=True)
started = 0
try:
    for _ in range(1000):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
print("ESCAPED" if started >= 1000 else "held", flush=True)
os._exit(0)
