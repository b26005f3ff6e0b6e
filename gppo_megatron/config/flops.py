"""Floating-point operations that a model's mathematics takes; a multiplication and an addition are two. No torch."""

from collections.abc import Sequence

from gppo_megatron.config.architecture import Architecture

TRAINING = 3
"""The backward pass has two products for each of the forward pass."""


def forward_flops(shape: Architecture, lengths: Sequence[int], rows: int) -> int:
    """Of one forward pass over sequences of these lengths, with the head on `rows` of their places.

    Every matrix costs 2 operations a weight and token, an expert's those of the tokens that go to it; causal attention
    2 x width of the heads for each query and each key it sees, once for the scores and once for the values. Norms,
    activations, the softmax, rotary positions and the embedding are left out, as is all that is done twice to save
    memory.
    """
    tokens = sum(lengths)
    width, groups = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * width + 2 * groups)
    matrices = sum(attention + _mlp_weights(shape, layer) for layer in range(shape.layers))
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return 2 * tokens * matrices + 4 * shape.layers * width * pairs + 2 * rows * shape.hidden * shape.vocab


def training_flops(shape: Architecture, lengths: Sequence[int], rows: int) -> int:
    """Of a forward and a backward pass."""
    return TRAINING * forward_flops(shape, lengths, rows)


def _mlp_weights(shape: Architecture, layer: int) -> int:
    """Weights that one token meets in the MLP or the experts of a layer, the router's included."""
    experts = shape.experts
    if experts is None or not shape.experts_in(layer):
        return 3 * shape.hidden * shape.ffn
    return experts.per_token * 3 * shape.hidden * experts.ffn + experts.count * shape.hidden
