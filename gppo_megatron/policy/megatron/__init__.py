"""The policy inside Megatron-Core; the only package that imports `megatron` or `torch.distributed`."""

import warnings

# Megatron-Core says these at every start, of what is a choice here and no fault.
for message in (
    "(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    "If you are using transformer_engine as the transformer implementation, the core_attn",
    "MimoModelConfig is experimental",
):
    warnings.filterwarnings("ignore", message=message, category=UserWarning)
# Torch renames collectives that Megatron-Core calls by their old names when tokens travel to experts.
warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
