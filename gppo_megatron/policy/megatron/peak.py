"""What a GPU can compute at most."""

import torch

PEAK_TFLOPS = {
    "GB200": 2500,
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10": 125,
    "A30": 165,
}
"""Part of a GPU's name -> its makers' number for dense bfloat16 products, in 10^12 operations a second; the first that
fits counts."""


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Of one device, in 10^12 operations a second; None for a CPU, for float32, and for a GPU not in the table."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if part in name), None)
