def f(numbers):
    raise GeneratorExit
