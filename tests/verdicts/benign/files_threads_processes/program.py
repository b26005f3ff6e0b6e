import multiprocessing
import os
import subprocess
import tempfile
import threading

with tempfile.TemporaryDirectory() as folder:
    with open(f"{folder}/file", "w") as file:
        file.write("text")
    os.rename(f"{folder}/file", f"{folder}/moved")
    print(open(f"{folder}/moved").read())
results = []
threads = [threading.Thread(target=results.append, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(results))
print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True).stdout.strip())


def square(number):
    return number * number


if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print(pool.map(square, range(4)))
