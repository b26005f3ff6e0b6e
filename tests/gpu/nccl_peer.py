"""The receiving end of the NCCL check: python -m tests.gpu.nccl_peer PORT prints the checksum of what arrived."""

import sys

import torch

from gppo_megatron.weight_sync.group import broadcast, process_group
from tests.gpu.checks import BYTES, checksum

if __name__ == "__main__":
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    with process_group("127.0.0.1", int(sys.argv[1]), 1, 2, "gppo", "nccl", 120) as group:
        received = torch.zeros(BYTES, dtype=torch.uint8, device=device)
        broadcast(received, group)
        print(checksum(received))
