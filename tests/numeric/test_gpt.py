"""The hook in place of GPTModel's head: one contract, whether Megatron-Core brings it or `gpt.py` adds it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from gppo_megatron.policy.megatron.gpt import GPT, HookedGPTModel, has_output_processor
from gppo_megatron.policy.megatron.update import MegatronModel
from tests.distributed.reference import VOCAB, random_model
from tests.single_process import logits_of, model_of, world_of_one

TOKENS_BS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MegatronModel:
    path = tmp_path_factory.mktemp("qwen3")
    random_model("qwen3", request.param).save_pretrained(path)
    return model_of(path)


def call(model: MegatronModel, processor: Any) -> Any:
    positions_BS = torch.arange(TOKENS_BS.shape[1]).expand_as(TOKENS_BS)
    return model.chunks[0](TOKENS_BS, positions_BS, None, output_processor=processor)


def test_the_model_returns_what_the_processor_makes_of_the_hidden_states(model: MegatronModel) -> None:
    calls = []

    def processor(**arguments: Any) -> str:
        calls.append(arguments)
        return "anything"

    assert call(model, processor) == "anything"
    (arguments,) = calls
    hidden_SBH, tied = arguments["hidden_states"], model.architecture.tied
    assert hidden_SBH.shape == (5, 2, 32)
    gpt = model.chunks[0].module
    assert arguments["output_layer"] is gpt.output_layer
    assert arguments["output_weight"] is (gpt.embedding.word_embeddings.weight if tied else None)
    weight_VH = arguments["output_weight"] if tied else gpt.output_layer.weight
    logits_BSV = (hidden_SBH @ weight_VH.t()).transpose(0, 1)
    assert logits_BSV.shape[2] == VOCAB
    torch.testing.assert_close(logits_BSV.detach(), logits_of(model, TOKENS_BS), rtol=1e-6, atol=1e-6)


def test_the_hook_lasts_one_call(model: MegatronModel) -> None:
    before_BSV = logits_of(model, TOKENS_BS)

    def processor(**_: Any) -> None:
        raise ArithmeticError("from the processor")

    with pytest.raises(ArithmeticError, match="from the processor"):
        call(model, processor)
    assert torch.equal(logits_of(model, TOKENS_BS), before_BSV)


class Newer:
    def forward(self, input_ids: Any, *, output_processor: Any = None) -> None:
        pass


class Older:
    def forward(self, input_ids: Any) -> None:
        pass


def test_the_hook_of_megatron_is_used_where_there_is_one() -> None:
    assert has_output_processor(Newer)
    assert not has_output_processor(Older)
    assert has_output_processor(GPT)
    assert GPT is (GPTModel if has_output_processor(GPTModel) else HookedGPTModel)
