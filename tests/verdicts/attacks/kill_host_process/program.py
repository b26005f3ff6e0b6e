import json
import os

host = json.loads(input())

print("ran", flush=True)
try:
    os.kill(host["pid"], 0)
    print("ESCAPED")
except OSError:
    print("held")
