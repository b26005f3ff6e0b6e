"""The server of the embedded engine, and clients that go away."""

import asyncio
from pathlib import Path
from typing import Any

import torch

from gppo_megatron.config.schema import TinyModel
from gppo_megatron.data.model_folder import create_tiny
from gppo_megatron.rollout.embedded import EmbeddedEngine
from gppo_megatron.serving.app import serving
from gppo_megatron.serving.sampler import Sampler
from gppo_megatron.serving.weights import WeightUpdates
from tests.served import CONTEXT, VOCAB


def test_a_client_that_is_gone_in_the_middle_of_its_request_is_no_error(tmp_path: Path) -> None:
    create_tiny(TinyModel(), tmp_path, seed=1)
    sampler = Sampler(EmbeddedEngine(tmp_path, torch.float32, torch.device("cpu"), cache_tokens=64), CONTEXT)
    app = serving(sampler, WeightUpdates(sampler), VOCAB, str(tmp_path))
    events: list[Any] = [
        {"type": "http.request", "body": b'{"input_ids": [', "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return events.pop(0)

    async def send(_: Any) -> None:
        """Nobody hears it."""

    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert events == []
    assert sampler.running == 0
