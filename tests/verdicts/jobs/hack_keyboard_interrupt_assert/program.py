def f(numbers):
    raise KeyboardInterrupt
