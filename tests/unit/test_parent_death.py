"""Forked processes, and those that they fork, end with a process that is killed."""

import subprocess
import sys

import psutil
import pytest

PROGRAM = """
import multiprocessing, os, time
from gppo_megatron.parent_death import forks_end_with_their_parent

forks_end_with_their_parent()
context = multiprocessing.get_context("fork")

def sleep(told):
    told.send(os.getpid())
    time.sleep(3600)

def fork(told):
    context.Process(target=sleep, args=(told,)).start()
    sleep(told)

heard, told = context.Pipe(duplex=False)
context.Process(target=fork, args=(told,)).start()
print(heard.recv(), heard.recv(), flush=True)
time.sleep(3600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_killed_process_leaves_no_fork() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        forks = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
        assert not psutil.wait_procs(forks, timeout=60)[1]
    assert len(forks) == 2
