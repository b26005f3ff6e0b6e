import os

print("ran", flush=True)
for name in ("mem", "environ", "maps", "cwd", "root", "fd"):
    for process in {os.getppid(), 1} - {os.getpid()}:
        path = f"/proc/{process}/{name}"
        try:
            if name in ("cwd", "root"):
                os.listdir(path)
            elif name == "fd":
                os.listdir(path)
            else:
                open(path, "rb").read(1)
            print("ESCAPED", path)
        except OSError:
            pass
print("done")
