"""Does Megatron-Core compute what transformers computes? One folder, both libraries, the same random tokens.

`python -m checkpoints_tools.parity FOLDER` prints the largest difference of the logits and OK or DIFFERENT, with exit
status 0 or 1; a folder that cannot be read is one message and another status. On the CPU, in float32.

`torchrun --nproc-per-node N -m checkpoints_tools.parity FOLDER` does so with tensor parallelism over N processes.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from gppo_verifiers.service.arguments import above_zero

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.config.schema import Parallel
from gppo_megatron.errors import ConfigError, GppoError
from gppo_megatron.policy.megatron.hf_folder import HfReader
from gppo_megatron.policy.megatron.model import build_model, transformer_config
from gppo_megatron.policy.megatron.platform import CPU
from gppo_megatron.policy.megatron.topology import topology
from gppo_megatron.policy.megatron.weights import load

TOLERANCE = 1e-5
SEED = 1
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Parity:
    """absolute: the largest difference of two logits. largest: the largest logit of transformers, in absolute value."""

    absolute: float
    largest: float

    @property
    def relative(self) -> float:
        return self.absolute / self.largest if self.largest else self.absolute


def compare(folder: Path, tokens: int) -> Parity:
    """Run `tokens` random tokens through both models, one after the other: memory holds one at a time.

    Raises ConfigError or CheckpointError for a folder that is unsupported or incomplete.
    """
    architecture = read_architecture(folder)
    if not 1 <= tokens <= architecture.max_positions:
        raise ConfigError(f"--tokens: must be 1 to {architecture.max_positions}, the model's positions (got {tokens})")
    generator = torch.Generator().manual_seed(SEED)
    tokens_BS = torch.randint(architecture.vocab, (1, tokens), generator=generator)
    ours_BSV = megatron_logits(folder, tokens_BS)
    theirs_BSV = transformers_logits(folder, tokens_BS)
    difference = (ours_BSV - theirs_BSV).abs().max()
    return Parity(float(difference), float(theirs_BSV.abs().max()))


def megatron_logits(folder: Path, tokens_BS: torch.Tensor) -> torch.Tensor:
    """float32 [B, S, vocabulary], on every process. Collective over the processes that torchrun started."""
    architecture, parallel = read_architecture(folder), Parallel(tensor=int(os.environ.get("WORLD_SIZE", "1")))
    with topology(parallel, CPU, SEED, TIMEOUT_SECONDS):
        config = transformer_config(architecture, parallel, CPU, torch.float32, {})
        model = build_model(config, architecture, CPU)
        load(model, architecture, HfReader(folder))
        positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
        with torch.no_grad():
            logits_BSV = model[0](tokens_BS, positions_BS, None, runtime_gather_output=True)
            return logits_BSV[..., : architecture.vocab]  # type: ignore[no-any-return]


def transformers_logits(folder: Path, tokens_BS: torch.Tensor) -> torch.Tensor:
    """float32 [B, S, vocabulary]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    with torch.no_grad():
        return model.eval()(tokens_BS).logits  # type: ignore[no-any-return]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = ArgumentParser(
        prog="python -m checkpoints_tools.parity",
        description="Compare Megatron-Core's logits with those of transformers for one model folder.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--tokens", type=int, default=64, help="random tokens to run (default %(default)s)")
    parser.add_argument(
        "--tolerance",
        type=above_zero,
        default=TOLERANCE,
        help="largest relative difference that is OK (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    transformers.logging.disable_progress_bar()
    try:
        parity = compare(options.folder, options.tokens)
    except GppoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if os.environ.get("RANK", "0") != "0":
        return 0
    equal = parity.relative <= options.tolerance
    print(
        f"{'OK' if equal else 'DIFFERENT'}: over {options.tokens} tokens the logits differ by at most "
        f"{parity.relative:.1e} of the largest logit (absolute {parity.absolute:.1e}, largest {parity.largest:.3g})"
    )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
