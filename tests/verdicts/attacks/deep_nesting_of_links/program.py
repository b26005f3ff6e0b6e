import os

print("ran", flush=True)
for number, target in enumerate(("/root", "/proc/1/root/root", "/proc/self/root/root", "../../../../root")):
    os.symlink(target, f"/tmp/link{number}")
    try:
        print("ESCAPED", os.listdir(f"/tmp/link{number}"))
    except OSError:
        pass
print("done")
