import atexit
import threading
import time

atexit.register(print, "end")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
