import os

print("ran", flush=True)
number = 0
try:
    for number in range(50_000):
        os.close(os.open(f"/tmp/{number}", os.O_CREAT | os.O_WRONLY))
except OSError:
    pass
print("ESCAPED" if number > 10_000 else "held")
