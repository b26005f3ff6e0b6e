"""The policy inside Megatron-Core; the only package that imports `megatron` or `torch.distributed`."""
