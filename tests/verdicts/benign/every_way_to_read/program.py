import sys

print(input())
print(sys.stdin.readline(), end="")
print(sys.stdin.buffer.raw is not None, sys.stdin.read().split())
for line in sys.stdin:
    print("nothing is left", line)
