import os
import resource

print("ran", flush=True)
for process in {1, os.getppid()} - {0, os.getpid()}:
    for name in ("CPU", "NOFILE", "AS", "FSIZE", "DATA"):
        try:
            resource.prlimit(process, getattr(resource, "RLIMIT_" + name), (0, 0))
            print("ESCAPED", name)
        except OSError:
            pass
for name in ("oom_score_adj", "coredump_filter", "timerslack_ns", "comm", "autogroup", "sched"):
    try:
        os.write(os.open(f"/proc/1/{name}", os.O_WRONLY), b"1")
        print("ESCAPED", name)
    except OSError:
        pass
print("done")
