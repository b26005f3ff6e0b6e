import os
import stat

print("ran", flush=True)
for path, device in (("/tmp/disk", os.makedev(254, 0)), ("/tmp/memory", os.makedev(1, 1))):
    try:
        os.mknod(path, 0o600 | stat.S_IFBLK, device)
        print("ESCAPED", path)
    except OSError:
        pass
for name in ("kmsg", "kvm", "mem", "vda", "sda", "fuse", "tty", "ptmx", "net/tun"):
    try:
        os.close(os.open("/dev/" + name, os.O_RDONLY))
        print("ESCAPED", name)
    except OSError:
        pass
print("done")
