print("ran", flush=True)
while True:
    pass
