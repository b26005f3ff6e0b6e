print("ran", flush=True)
print("done")
