import json
import os

host = json.loads(input())

print("ran", flush=True)
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", host["sleep"]])
        os._exit(0)
print("done")
