import threading
import time

threading.Thread(target=time.sleep, args=(1000,)).start()


def f(numbers):
    return sorted(numbers)
