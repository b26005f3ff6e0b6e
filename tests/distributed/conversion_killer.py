"""Kills conversions by several processes: `python -m tests.distributed.conversion_killer HF_FOLDER ROOT`.

Each conversion is a fork of this process with writers of its own. Alternately its main process and one of its writers
is killed, once a random number of files is there; the next one goes on. Prints how many were killed and, for each, how
many finished files it left.
"""

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from checkpoints_tools import convert
from checkpoints_tools.convert import Options
from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.stored_layout import stored_layout

MOMENTS, MOST_FILES, WRITERS = 6, 4, 2
OPTIONS = Options(processes=WRITERS, file_bytes=2048)
PATIENCE_SECONDS = 240
REFUSED = 4


def conversion(source: Path, target: Path, say: Callable[[str], None]) -> int:
    """The process id of a conversion that has started; it ends with 0, or REFUSED after an error of one sentence."""
    child = os.fork()
    if child:
        return child
    try:
        convert.hf_to_megatron(source, target, OPTIONS, say)
    except CheckpointError as error:
        os._exit(REFUSED if "a writing process was killed" in str(error) else 1)
    os._exit(0)


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def finished(target: Path) -> int:
    return len(list(target.with_name(f"{target.name}.unfinished").glob(".journal/*.json")))


def kill_one(source: Path, target: Path, moments: random.Random, the_whole: bool) -> None:
    """the_whole: the main process is killed, else one of its writers."""
    main = psutil.Process(conversion(source, target, lambda _: None))
    least = finished(target) + moments.randint(1, MOST_FILES)
    wait(lambda: finished(target) >= least)
    family = main.children(recursive=True)
    writers = [each for each in family if "spawn_main" in " ".join(each.cmdline()) and "tracker" not in each.name()]
    (main if the_whole else moments.choice(writers)).kill()
    _, status = os.waitpid(main.pid, 0)
    assert os.waitstatus_to_exitcode(status) == (-9 if the_whole else REFUSED), status
    wait(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family))
    assert not target.exists()
    assert finished(target) >= least


def main(source: Path, root: Path) -> None:
    layout = stored_layout(read_architecture(source))
    convert.stored_layout = lambda _: layout
    moments, target = random.Random(5), root / "target"
    for moment in range(MOMENTS):
        kill_one(source, target, moments, the_whole=moment % 2 == 0)
        print(finished(target), flush=True)
    _, status = os.waitpid(conversion(source, target, lambda line: print(line, flush=True)), 0)
    assert status == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
