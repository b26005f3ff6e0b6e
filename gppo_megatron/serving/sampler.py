"""Responses under way, sampled together a piece at a time, so that they stream, stop and change weights between two."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from gppo_megatron.errors import SyncError
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.rollout.engine import Completion, Request

SEED_STEP = 0x9E3779B97F4A7C15
"""Apart enough, from one token to the next, that no two pieces share their random numbers."""


@dataclass
class Response:
    """One response under way. pieces: told after every piece; the last one has an end.

    experts: int16 [prompt + n, layers, k], as `Completion.experts`: every piece reads all tokens again.
    """

    name: str
    request: Request
    pieces: "asyncio.Queue[Response]" = field(default_factory=asyncio.Queue)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    experts: NDArray[np.int16] | None = None
    end: str | None = None

    def piece(self, tokens: int) -> Request:
        """What to sample next: at most `tokens` of what is missing."""
        sampling = self.request.sampling
        left = min(tokens, sampling.max_new_tokens - len(self.token_ids))
        next_tokens = replace(sampling, max_new_tokens=left)
        seed = (self.request.seed + SEED_STEP * len(self.token_ids)) % 2**62
        return Request(self.request.prompt_ids + tuple(self.token_ids), next_tokens, seed)

    def add(self, completion: Completion, weights: str) -> None:
        self.token_ids += completion.token_ids.tolist()
        self.logprobs += [float(logprob) for logprob in completion.logprobs]
        self.versions += [weights] * len(completion.token_ids)
        self.experts = completion.experts
        if completion.top is not None:
            for ids, logprobs in zip(completion.top.ids.tolist(), completion.top.logprobs.tolist(), strict=True):
                self.top.append([(logprob, token) for logprob, token in zip(logprobs, ids, strict=True) if token >= 0])
        if completion.finish == "stop":
            self.end = "stop"
        elif len(self.token_ids) >= self.request.sampling.max_new_tokens:
            self.end = "length"
        self.pieces.put_nowait(self)

    def abort(self) -> None:
        self.end = "abort"
        self.pieces.put_nowait(self)


class Sampler:
    """The one user of the engine: pieces of responses and changes of weights take turns.

    context: most tokens of a prompt and its response. tokens_a_piece: sampled of each response in one turn.
    """

    def __init__(self, engine: EmbeddedEngine, context: int, tokens_a_piece: int = 32) -> None:
        self.context = context
        self.weights = "default"
        self._engine = engine
        self._tokens_a_piece = tokens_a_piece
        self._active: dict[str, Response] = {}
        self._turn = asyncio.Lock()
        self._work = asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def has_experts(self) -> bool:
        return self._engine.has_experts

    def submit(self, response: Response) -> None:
        """Begin a response. Raises ValueError where it does not fit the model, or its name is in use."""
        if response.name in self._active:
            raise ValueError(f"Duplicate request ID detected: {response.name}")
        total = len(response.request.prompt_ids) + response.request.sampling.max_new_tokens
        if total > self.context:
            raise ValueError(f"Requested token count {total} exceeds the model's maximum context length {self.context}")
        self._active[response.name] = response
        self._work.set()

    def abort(self, prefix: str) -> None:
        """End the responses whose names begin so."""
        for name in [name for name in self._active if name.startswith(prefix)]:
            self._active.pop(name).abort()

    def pause(self, aborting: bool) -> None:
        """Begin no further piece until `go_on`; aborting: end all responses first."""
        self._going.clear()
        if aborting:
            self.abort("")

    def go_on(self) -> None:
        self._going.set()

    async def change(self, weights: Mapping[str, torch.Tensor], name: str) -> None:
        """Replace all weights between two pieces. Raises SyncError where they do not fit; then it samples no more."""
        async with self._turn:
            self.weights = f"none: {name} did not fit"
            await asyncio.to_thread(self._engine.load, 0, weights.items())
            self.weights = name

    def rename(self, name: str) -> None:
        self.weights = name

    async def read(self, look: Callable[[EmbeddedEngine], Mapping[str, str]]) -> Mapping[str, str]:
        """What `look` sees between two pieces."""
        async with self._turn:
            return await asyncio.to_thread(look, self._engine)

    async def run(self) -> None:
        """Sample for ever."""
        while True:
            await self._work.wait()
            await self._going.wait()
            async with self._turn:
                await self._one_piece()
            await asyncio.sleep(0)  # lets a change of weights have its turn

    async def _one_piece(self) -> None:
        responses = list(self._active.values())
        if not responses:
            self._work.clear()
            return
        reported = _reported(responses[0])  # the engine reports the same of all requests of a batch
        responses = [each for each in responses if _reported(each) == reported]
        requests = [response.piece(self._tokens_a_piece) for response in responses]
        try:
            completions = await asyncio.to_thread(self._engine.generate, requests)
        except SyncError:
            self.abort("")
            return
        for response, completion in zip(responses, completions, strict=True):
            if response.end is None:  # not aborted meanwhile
                response.add(completion, self.weights)
            if response.end is not None:
                self._active.pop(response.name, None)


def _reported(response: Response) -> tuple[int, bool]:
    """What is asked of its tokens beside their log-probs."""
    return response.request.sampling.top_tokens, response.request.sampling.experts
