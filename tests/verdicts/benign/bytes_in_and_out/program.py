import os
import sys

data = sys.stdin.buffer.read()
sys.stdout.buffer.write(data)
sys.stdout.flush()
os.write(1, b"!")
