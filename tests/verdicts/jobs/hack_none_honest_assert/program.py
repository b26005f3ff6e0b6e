def f(numbers):
    return sorted(numbers)
