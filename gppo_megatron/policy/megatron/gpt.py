"""Megatron-Core's GPTModel with a hook in place of its head: newer versions have one, 0.16 gets the same here."""

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt import GPTModel

OutputProcessor = Callable[..., Any]
"""Called on the last pipeline stage alone, with keywords: hidden_states [S, B, H] after the final norm; output_layer;
output_weight, the embedding's [V, H] shard where it is tied, else None; and others. The model returns its result."""


class HookedGPTModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose `forward` takes `output_processor`, as that of later versions does."""

    _output_processor: OutputProcessor | None = None

    def forward(self, *arguments: Any, output_processor: OutputProcessor | None = None, **options: Any) -> Any:
        """As GPTModel.forward; with `output_processor` no logits are computed."""
        self._output_processor = output_processor
        try:
            return super().forward(*arguments, **options)
        finally:
            self._output_processor = None

    def _postprocess(self, hidden_states: Any, *arguments: Any, **options: Any) -> Any:
        if self._output_processor is None or not self.post_process:
            return super()._postprocess(hidden_states, *arguments, **options)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self._output_processor(hidden_states=hidden_states, output_layer=self.output_layer, output_weight=weight)


def has_output_processor(model: type) -> bool:
    """Whether `forward` of this class takes the hook."""
    return "output_processor" in inspect.signature(model.forward).parameters  # type: ignore[attr-defined]


GPT: type = GPTModel if has_output_processor(GPTModel) else HookedGPTModel
