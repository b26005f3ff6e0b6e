"""Kills a conversion at random moments: `python -m tests.unit.conversion_killer HF_FOLDER ROOT`.

Everything is imported once; each conversion is a fork of this process. Prints how many were killed before they ended.
"""

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from checkpoints_tools import convert
from checkpoints_tools.convert import Options
from gppo_megatron.checkpoint.manifest import verify
from gppo_megatron.checkpoint.metadata import check
from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.policy.megatron.stored_layout import stored_layout

MOMENTS = 20
OPTIONS = Options(file_bytes=4096)


def silent(_: str) -> None:
    pass


def conversion(source: Path, target: Path) -> int:
    """The process id of a conversion that has started."""
    child = os.fork()
    if child:
        return child
    convert.hf_to_megatron(source, target, OPTIONS, silent)
    os._exit(0)


def main(source: Path, root: Path) -> None:
    layout = stored_layout(read_architecture(source))
    convert.stored_layout = lambda _: layout
    begin = time.monotonic()
    os.waitpid(conversion(source, root / "whole"), 0)
    whole = time.monotonic() - begin
    moments, killed = random.Random(5), 0
    target = root / "target"
    while killed < MOMENTS:
        child = conversion(source, target)
        time.sleep(moments.uniform(0, whole))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not target.exists():
            killed += 1
            continue
        verify(target)
        check(target)
        shutil.rmtree(target)
    os.waitpid(conversion(source, target), 0)
    print(killed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
