import os

print("ran", flush=True)
for path in ("/x", "/usr/x", "/usr/bin/x", "/etc/x", "/dev/x", "/usr/local/x", "/bin/x"):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        print("ESCAPED", path)
    except OSError:
        pass
for path in ("/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches",
             "/proc/self/oom_score_adj"):
    try:
        descriptor = os.open(path, os.O_WRONLY)
        os.write(descriptor, b"-1000" if path.endswith("adj") else b"")
        print("ESCAPED", path)
    except OSError:
        pass
print("done")
