import json
import os


def f():
    numbers = [number * (2**61 - 1) for number in range(40_000)]
    reply = json.dumps(["t", ["value", ["s", numbers]]]).encode() + b"\n"
    for descriptor in range(3, 64):
        try:
            while reply:
                reply = reply[os.write(descriptor, reply) :]
        except OSError:
            pass
    os._exit(0)
