"""One optimizer step gives one gradient, whatever the layout, the micro-batches, the padding or the tying.

The reference is the Hugging Face model under plain autograd, with the trust region written out by hand.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gppo_megatron.config.architecture import hf_config_of_tiny
from gppo_megatron.config.schema import TinyModel
from tests.distributed.processes import run_group
from tests.distributed.reference import hf_gradients, relative

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("layouts.py")

# (tensor, pipeline, data, micro_batch_tokens); a vocabulary of 21 is padded to 22 under tensor parallelism
LAYOUTS = [(1, 1, 1, 4096), (1, 1, 1, 20), (2, 1, 1, 4096), (1, 2, 1, 40), (1, 1, 2, 40), (2, 2, 1, 60)]


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with weights large enough that its log-probs are far from uniform."""
    config = hf_config_of_tiny(TinyModel(tied=request.param == "tied", layers=4))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def test_every_layout_has_the_same_gradient(folder: Path, tmp_path: Path) -> None:
    reference = hf_gradients(folder)
    results: dict[tuple[int, ...], dict[str, Any]] = {}
    for layout in LAYOUTS:
        output = tmp_path / f"{'-'.join(map(str, layout))}.pt"
        tensor, pipeline, data, _ = layout
        run_group(SCRIPT, [str(folder), *map(str, layout), str(output)], tensor * pipeline * data)
        results[layout] = torch.load(output)
    plain = results[LAYOUTS[0]]["metrics"]
    for layout, result in results.items():
        assert result["nearest"] > 1e-5, "a token lies on its threshold: the layouts may decide differently"
        assert set(result["gradients"]) == set(reference)
        worst = {name: relative(result["gradients"][name], gradient) for name, gradient in reference.items()}
        assert max(worst.values()) <= 1e-5, (layout, max(worst, key=worst.__getitem__), max(worst.values()))
        assert result["metrics"][0]["optimizer/grad_norm"] == pytest.approx(plain[0]["optimizer/grad_norm"], rel=1e-5)
        assert sum(values["loss/total"] for values in result["metrics"]) == pytest.approx(
            plain[0]["loss/total"], rel=1e-5
        )
        assert len(result["metrics"]) == layout[2], "one rank of each replica reports"
    assert results[(1, 1, 1, 20)]["micro_batches"] > 5
    assert 0.5 < min(plain[0]["kept/positive"], plain[0]["kept/negative"]) < 0.95, "the trust region must mask here"
