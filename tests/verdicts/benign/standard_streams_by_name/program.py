with open("/dev/stdin") as file:
    text = file.read()
with open("/dev/stdout", "w") as file:
    file.write(text)
