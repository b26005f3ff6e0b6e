import os

print("ran", flush=True)
data = bytearray(1 << 30)
for place in range(0, len(data), 4096):
    data[place] = 1
print("ESCAPED", len(data))
