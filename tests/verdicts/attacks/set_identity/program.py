import os

print("ran", flush=True)
for call in (os.setuid, os.setgid, os.seteuid, os.setegid):
    try:
        call(0)
        print("ESCAPED", call.__name__)
    except OSError:
        pass
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file if ":" in line)
for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
    if int(status[name], 16):
        print("ESCAPED", name, status[name])
if status["NoNewPrivs"].strip() != "1" or status["Seccomp"].strip() != "2" or 0 in map(int, status["Uid"].split()):
    print("ESCAPED", status["NoNewPrivs"], status["Seccomp"], status["Uid"])
print("done")
