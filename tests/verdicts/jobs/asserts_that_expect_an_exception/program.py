def f(x):
    raise KeyError(x)
