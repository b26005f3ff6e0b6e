def f(number):
    return number > 0
