data = b"x" * (1 << 30)
print(3)
