"""Do two model folders hold the same model: tensor by tensor, and by what they compute."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoints_tools.activations import SEED, hf_activations, megatron_activations
from checkpoints_tools.convert import open_source
from checkpoints_tools.side_files import model_files
from checkpoints_tools.sources import HfSource, MegatronSource
from gppo_megatron.checkpoint.manifest import MANIFEST, verify
from gppo_megatron.config.architecture import Architecture, read_architecture
from gppo_megatron.errors import CheckpointError
from gppo_megatron.policy.megatron.mapping.pieces import StoredLayout
from gppo_megatron.policy.megatron.stored_layout import stored_layout

TOLERANCE = 1e-5
SHOWN = 5


@dataclass(frozen=True)
class Difference:
    """A tensor, by its Hugging Face name, whose bits differ. largest: the largest absolute difference."""

    name: str
    largest: float
    dtypes: str


@dataclass(frozen=True)
class Step:
    """The first layer whose output differs; None where all agree. largest: over the logits, of the largest logit."""

    layer: int | None
    largest: float


def compare_folders(first: Path, second: Path, tokens: int, say: Callable[[str], None]) -> bool:
    """Compare, and tell. tokens: random tokens to run through both models; 0 for none. Returns whether all is equal.

    Raises CheckpointError or ConfigError for a folder that is damaged or incomplete.
    """
    for folder in (first, second):
        if (folder / MANIFEST).exists():
            verify(folder)
            say(f"{folder}: every file is as it was written")
    architectures = [read_architecture(model_files(folder)) for folder in (first, second)]
    if architectures[0] != architectures[1]:
        say(f"DIFFERENT: the architectures differ, {architectures[0]} and {architectures[1]}")
        return False
    architecture = architectures[0]
    layout = stored_layout(architecture)
    a, b = (open_source(folder, layout, architecture) for folder in (first, second))
    for source in (a, b) if tokens else ():
        if source.dequantized:
            raise CheckpointError(f"{source.folder}: logits of quantized weights are not computed; leave --tokens away")
    found = differences(a, b, layout)
    names = [name for parameter in layout.parameters for name in parameter.rule.hf]
    say(f"tensors: {len(names) - len(found)} of {len(names)} are equal bit for bit")
    for difference in found[:SHOWN]:
        say(f"  {difference.name} differs by up to {difference.largest:.3g} ({difference.dtypes})")
    if len(found) > SHOWN:
        say(f"  and {len(found) - SHOWN} more")
    agree = True
    if tokens:
        agree = _compare_logits(a, b, layout, architecture, tokens, found, say)
    say("OK" if agree and not found else "DIFFERENT")
    return agree and not found


def differences(
    first: HfSource | MegatronSource, second: HfSource | MegatronSource, layout: StoredLayout
) -> list[Difference]:
    """One parameter of each side in memory at a time."""
    found = []
    for parameter in layout.parameters:
        for name, a, b in zip(parameter.rule.hf, first.hf(parameter), second.hf(parameter), strict=True):
            if a.dtype != b.dtype or not torch.equal(_bits(a), _bits(b)):
                largest = float((a.double() - b.double()).abs().max())
                found.append(Difference(name, largest, f"{a.dtype} and {b.dtype}".replace("torch.", "")))
    return found


def first_difference(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float) -> int | None:
    """The first place where the outputs differ, found by halving: once a layer differs, those after it do."""
    place = bisect_left(range(len(a)), True, key=lambda i: relative(a[i], b[i]) > tolerance)
    return None if place == len(a) else place


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, of the largest number of `b`."""
    largest = float(b.abs().max())
    return float((a - b).abs().max()) / largest if largest else float((a - b).abs().max())


def _compare_logits(
    a: HfSource | MegatronSource,
    b: HfSource | MegatronSource,
    layout: StoredLayout,
    architecture: Architecture,
    tokens: int,
    found: list[Difference],
    say: Callable[[str], None],
) -> bool:
    generator = torch.Generator().manual_seed(SEED)
    length = min(tokens, architecture.max_positions)
    if length < tokens:
        say(f"--tokens {tokens}: the model has {length} positions, so {length} tokens are compared")
    tokens_BS = torch.randint(architecture.vocab, (1, length), generator=generator)
    ours, theirs = (_activations(source, layout, architecture, tokens_BS) for source in (a, b))
    difference = relative(ours[-1], theirs[-1])
    agreement = float((ours[-1].argmax(-1) == theirs[-1].argmax(-1)).float().mean())
    say(
        f"logits over {length} random tokens: they differ by at most {difference:.1e} of the largest; "
        f"the likeliest token is the same at {agreement:.1%}"
    )
    place = first_difference(ours, theirs, TOLERANCE)
    if place is None:
        return True
    if place == architecture.layers:
        where, prefix = "after the last layer", ("model.norm.", "lm_head.", "model.embed_tokens.")
    else:
        embedding = ("model.embed_tokens.",) if place == 0 else ()
        where, prefix = f"in layer {place}", (f"model.layers.{place}.", *embedding)
    named = [each.name for each in found if each.name.startswith(prefix)]
    cause = (
        f"the first tensor to differ there is {named[0]}" if named else "its tensors are equal, the mathematics is not"
    )
    say(f"the first difference arises {where}; {cause}")
    return False


def _activations(
    source: HfSource | MegatronSource, layout: StoredLayout, architecture: Architecture, tokens_BS: torch.Tensor
) -> list[torch.Tensor]:
    match source:
        case HfSource(folder=folder):
            return hf_activations(folder, tokens_BS)
        case MegatronSource():
            return megatron_activations(source, layout, architecture, tokens_BS)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Equal bits are equal, -0.0 is not 0.0."""
    return tensor.contiguous().view(torch.uint8)
