"""The trainable policy: `api` says what the loop may know, `megatron` is the implementation."""
