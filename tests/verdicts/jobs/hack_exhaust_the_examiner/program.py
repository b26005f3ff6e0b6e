def f(numbers):
    return [0] * 10_000_000
