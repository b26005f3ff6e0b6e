import time

print("ran", flush=True)
time.sleep(1000)
print("ESCAPED")
