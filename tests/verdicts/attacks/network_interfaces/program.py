import os

print("ran", flush=True)
names = [name for name in os.listdir("/proc/self/net/dev_snmp6")] if os.path.isdir("/proc/self/net/dev_snmp6") else []
with open("/proc/self/net/dev") as file:
    names += [line.split(":")[0].strip() for line in file if ":" in line]
print("ESCAPED" if set(names) - {"lo"} else "held")
