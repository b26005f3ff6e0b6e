import json
import socket

host = json.loads(input())

print("ran", flush=True)
try:
    socket.create_connection(("127.0.0.1", host["port"]), 2).close()
    print("ESCAPED")
except OSError:
    print("held")
