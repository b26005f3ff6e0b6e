def f(numbers):
    return numbers.sorted()
