print("ran", flush=True)
try:
    open("/etc/shadow").close()
    print("ESCAPED")
except OSError:
    print("held")
