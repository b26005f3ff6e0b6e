import sys

sys.setrecursionlimit(10**6)


def depth(number):
    return 0 if number == 0 else 1 + depth(number - 1)


print(depth(100_000))
