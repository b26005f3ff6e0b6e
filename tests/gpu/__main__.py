"""python -m tests.gpu: every check; python -m tests.gpu NAME: that one, in this process.

Exit status 0: none failed; 1: some did; 3: the one check cannot be taken here; 77: there is no GPU.
"""

import sys
from functools import partial

import torch

from tests.gpu.checks import CHECKS
from tests.gpu.verdicts import NO_GPU, in_a_process, one, table


def machine() -> str:
    """The GPUs and the versions that a verdict belongs to."""
    count, capability = torch.cuda.device_count(), torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    return f"{count} x {name}, capability {capability[0]}.{capability[1]}, torch {torch.__version__}"


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        print("torch sees no GPU here: nothing was verified")
        return NO_GPU
    if not arguments:
        return table(machine(), CHECKS, in_a_process)
    (name,) = arguments
    return one(name, partial(CHECKS[name], torch.device("cuda", 0)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
