"""What each layer of a model puts out, for the same tokens, from either kind of folder. On the CPU, in float32."""

from pathlib import Path
from typing import Any

import torch
import transformers

from checkpoints_tools.sources import MegatronSource
from gppo_megatron.config.architecture import Architecture
from gppo_megatron.config.schema import Parallel
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.mapping.pieces import StoredLayout
from gppo_megatron.policy.megatron.model import build_model, named_parameters, transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.topology import topology

SEED = 1
TIMEOUT_SECONDS = 60.0


class Recorder:
    """Keeps what modules put out, in the order they run."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def __call__(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        self.outputs.append(tensor.detach().clone())


def hf_activations(folder: Path, tokens_BS: torch.Tensor) -> list[torch.Tensor]:
    """[B, S, hidden] after each layer, and the logits [B, S, vocabulary]; by transformers."""
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    ).eval()
    recorder = Recorder()
    for layer in model.model.layers:
        layer.register_forward_hook(recorder)
    with torch.no_grad():
        logits_BSV = model(tokens_BS).logits
    return [*recorder.outputs, logits_BSV]


def megatron_activations(
    source: MegatronSource, layout: StoredLayout, architecture: Architecture, tokens_BS: torch.Tensor
) -> list[torch.Tensor]:
    """The same by Megatron-Core, from a distributed checkpoint. Its parameters are NaN before they are filled.

    Raises CheckpointError where one stays so.
    """
    with topology(Parallel(), CPU, SEED, TIMEOUT_SECONDS):
        config = transformer_config(architecture, Parallel(), CPU, torch.float32, {})
        (model,) = build_model(config, architecture, CPU)
        stored = {parameter.rule.megatron: parameter for parameter in layout.parameters}
        for name, parameter in named_parameters([model]):
            if name in stored:  # a tied head is the embedding itself
                with torch.no_grad():
                    parameter.copy_(source.whole(stored[name]))
        unfilled = [name for name, parameter in named_parameters([model]) if not parameter.isfinite().all()]
        if unfilled:
            raise CheckpointError(f"{source.folder}: nothing fills {', '.join(unfilled)}, or it holds NaN or infinity")
        recorder = Recorder()
        for layer in model.module.decoder.layers:
            layer.register_forward_hook(recorder)
        positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        with torch.no_grad():
            logits_BSV = model(tokens_BS, positions_BS, None)[..., : architecture.vocab]
    return [*(output_SBH.transpose(0, 1) for output_SBH in recorder.outputs), logits_BSV]
