def f(numbers):
    print('[1, 2, 3]')
    return sorted(numbers)
