import json
import os

host = json.loads(input())

print("ran", flush=True)
seen = [path for path in (host["secret"], "/root", "/home", "/var", "/etc/hostname", "/sys") if os.path.exists(path)]
print("ESCAPED" if seen else "held", seen)
