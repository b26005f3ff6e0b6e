import json
import socket

host = json.loads(input())

print("ran", flush=True)
try:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect("\0" + host["socket"])
    print("ESCAPED")
except OSError:
    print("held")
