"""The policy inside Megatron-Core; the only package that imports `megatron` or `torch.distributed`."""

import warnings

# Megatron-Core says these at every start, of what is a choice here and no fault.
for message in (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    "MimoModelConfig is experimental",
):
    warnings.filterwarnings("ignore", message=message, category=UserWarning)
