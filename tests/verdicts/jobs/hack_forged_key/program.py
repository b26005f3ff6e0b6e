def f():
    return {10**4500: 1}
