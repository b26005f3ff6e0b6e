"""`gppo convert`: from parsed arguments to one of the tools."""

import sys
from argparse import Namespace
from pathlib import Path

import torch

from checkpoints_tools.convert import Options, reshard
from checkpoints_tools.layouts import Cuts, cut_problems
from checkpoints_tools.providers import PROVIDERS, Provider
from checkpoints_tools.side_files import model_files
from checkpoints_tools.verify import compare_folders
from gppo_megatron.checkpoint.manifest import verify
from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.errors import ConfigError


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(arguments: Namespace) -> int:
    """Returns the exit status: 1 for folders that differ. Raises ConfigError or CheckpointError."""
    source, target = Path(arguments.source), Path(arguments.target) if arguments.target else None
    match arguments.convert_command:
        case "verify":
            return _verify(source, target, arguments.tokens)
        case "reshard":
            _options(arguments)
            _check_cuts(source, arguments)
            if target is not None:
                reshard(source, target, _options(arguments), say)
            return 0
    provider = _provider(arguments.provider)
    convert = provider.hf_to_megatron if arguments.convert_command == "hf-to-megatron" else provider.megatron_to_hf
    assert target is not None  # the parser asks for it
    convert(source, target, _options(arguments), say)
    return 0


def _verify(source: Path, target: Path | None, tokens: int) -> int:
    if target is not None:
        return 0 if compare_folders(source, target, tokens, say) else 1
    verify(source)
    say(f"OK: every file of {source} is as it was written")
    return 0


def _check_cuts(source: Path, arguments: Namespace) -> None:
    folder = Path(arguments.config) if arguments.config else model_files(source)
    problems = cut_problems(read_architecture(folder), Cuts(arguments.tensor, arguments.pipeline))
    if problems:
        raise ConfigError("; ".join(problems))
    say(f"{source} loads with tensor parallelism {arguments.tensor} and {arguments.pipeline} pipeline stages")


def _provider(name: str) -> Provider:
    if name not in PROVIDERS:
        raise ConfigError(f"--provider {name}: no such provider; there are {', '.join(PROVIDERS)}")
    return PROVIDERS[name]()


def _options(arguments: Namespace) -> Options:
    for name in ("processes", "tensor"):
        if getattr(arguments, name, 1) < 1:
            raise ConfigError(f"--{name}: must be at least 1 (got {getattr(arguments, name)})")
    dtype = getattr(arguments, "dtype", None)
    return Options(
        processes=arguments.processes,
        dtype=getattr(torch, dtype) if dtype else None,
        tensor=getattr(arguments, "tensor", 1),
        config=Path(arguments.config) if arguments.config else None,
        dry=arguments.dry_run,
    )
