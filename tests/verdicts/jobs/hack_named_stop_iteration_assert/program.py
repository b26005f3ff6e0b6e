class Sly(Exception):
    pass


Sly.__name__ = "StopIteration"


def f(numbers):
    raise Sly
