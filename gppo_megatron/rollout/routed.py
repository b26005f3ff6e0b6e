"""Which experts the tokens of a batch that is being sampled go to."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gppo_megatron.rollout.engine import Request


class Routers:
    """The routers of a Hugging Face model, each of which leaves its latest choice here.

    layers: of the model, 0 where none has experts.
    """

    def __init__(self, model: Any) -> None:
        self._latest: dict[int, torch.Tensor] = {}
        self._experts_per_token = 0
        layers = model.model.layers
        for number, layer in enumerate(layers):
            router = getattr(layer.mlp, "gate", None)
            if router is not None:
                self._experts_per_token = router.top_k
                router.register_forward_hook(partial(self._note, number))
        self.layers = len(layers) if self._experts_per_token else 0

    def _note(self, layer: int, router: Any, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        """A router returns logits, scores and choices, the last int64 [rows x places, k]."""
        self._latest[layer] = outputs[2]

    def empty(self, rows: int, places: int, device: torch.device) -> torch.Tensor:
        """int16 [rows, places, layers, k] of -1."""
        shape = (rows, places, self.layers, self._experts_per_token)
        return torch.full(shape, -1, dtype=torch.int16, device=device)

    def latest(self, rows: int) -> torch.Tensor:
        """int16 [rows, places, layers, k]: the choices of the forward pass that ended last, on `rows` rows."""
        places = len(next(iter(self._latest.values()))) // rows
        chosen = self.empty(rows, places, next(iter(self._latest.values())).device)
        for layer, experts in self._latest.items():
            chosen[:, :, layer] = experts.view(rows, places, -1).to(torch.int16)
        return chosen


class Routed:
    """Keeps the experts of each row's tokens, prompt included, on the device; nothing where no request asks for them.

    Raises ValueError where some requests of one batch ask for them and others do not.
    """

    def __init__(self, requests: Sequence[Request], width: int, routers: Routers, device: torch.device) -> None:
        asked = {request.sampling.experts for request in requests}
        if len(asked) > 1:
            raise ValueError("some requests of one batch ask for the experts of their tokens, and others do not")
        (self._asked,) = asked
        self._routers = routers
        self._prompts = [len(request.prompt_ids) for request in requests]
        self._longest = max(self._prompts)
        places = self._longest + width if self._asked else 0
        self._chosen = routers.empty(len(requests), places, device)

    def note(self, places: torch.Tensor, step: int) -> None:
        """places: int64 [n], the rows of the pass that read the prompts (step 0) or the token drawn the step before."""
        if not self._asked:
            return
        start, end = (0, self._longest) if step == 0 else (self._longest + step - 1, self._longest + step)
        self._chosen[places, start:end] = self._routers.latest(len(places))

    def rows(self, lengths: Sequence[int]) -> list[NDArray[np.int16] | None]:
        """Of each row, its prompt and its `length` drawn tokens; the last of these was never read."""
        if not self._asked:
            return [None] * len(lengths)
        chosen = self._chosen.cpu().numpy()
        result: list[NDArray[np.int16] | None] = []
        for row, (prompt, length) in enumerate(zip(self._prompts, lengths, strict=True)):
            kept = chosen[row, self._longest - prompt : self._longest + length].copy()
            kept[-1] = -1  # a row that stays in the batch reads on
            result.append(kept)
        return result
