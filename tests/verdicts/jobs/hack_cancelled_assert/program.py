def f(numbers):
    raise __import__("asyncio").CancelledError
