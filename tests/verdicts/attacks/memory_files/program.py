import os

print("ran", flush=True)
descriptors = [os.memfd_create(str(number)) for number in range(128)]
total = 0
for descriptor in descriptors:
    for _ in range(8):
        try:
            total += os.write(descriptor, b"x" * (1 << 20))
        except OSError:
            break
print("ESCAPED", total) if total > 512 << 20 else print("held")
