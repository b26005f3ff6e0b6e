"""Standard input that can be read and nothing else."""

import fcntl
import os

# Linux's numbers, for which typeshed and some builds of Python have no names.
F_ADD_SEALS = 1033
SEAL_EVERYTHING = 0x1 | 0x2 | 0x4 | 0x8  # further seals, shrinking, growing, writing


def sealed_file(content: bytes, name: str = "stdin") -> int:
    """A descriptor to read `content` from its start. The file has no path, and nobody can change it.

    Without the seals a program could open /proc/self/fd/0 for writing and change what a later test reads.
    """
    writer = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(writer, rest) :]
        fcntl.fcntl(writer, F_ADD_SEALS, SEAL_EVERYTHING)
        return os.open(f"/proc/self/fd/{writer}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writer)
