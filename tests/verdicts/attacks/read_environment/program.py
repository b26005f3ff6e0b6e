import json
import os

host = json.loads(input())

print("ran", flush=True)
found = [value for value in os.environ.values() if host["marker"] in value]
for process in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{process}/environ") as file:
            found += [process] if host["marker"] in file.read() else []
    except OSError:
        pass
print("ESCAPED" if found else "held")
