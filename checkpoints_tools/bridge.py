"""Megatron-Bridge as a converter of families that the mapping table lacks. Unverified: it has not run here."""

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from checkpoints_tools.convert import Options
from gppo_megatron.checkpoint.folder import new_folder
from gppo_megatron.checkpoint.headers import hf_tensors
from gppo_megatron.checkpoint.metadata import METADATA, check
from gppo_megatron.errors import CheckpointError, ConfigError

BRIDGE, BRIDGE_VERSION = "megatron-bridge", "0.3.1"
RUN_CONFIG = "run_config.yaml"
SHOWN = 5

CALLED = re.compile(r"megatron\.(core|bridge)(\.[a-z]\w*)+\.[A-Z]\w*(Config|ConfigContainer|Provider\w*)")
NAMED = re.compile(r"(megatron\.(core|bridge)|torch)(\.\w+)+")
"""What a checkpoint's own configuration may have Megatron-Bridge call, and name without calling."""


class MegatronBridge:
    """A provider: it builds the whole model in memory, and lays its checkpoint out by its own rules."""

    def __init__(self) -> None:
        """Raises ConfigError where exactly that version is not installed."""
        try:
            found = importlib.metadata.version(BRIDGE)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(
                f"--provider {BRIDGE}: it is not installed; pip install {BRIDGE}=={BRIDGE_VERSION} in an environment "
                "of its own, with CUDA and Transformer Engine"
            ) from None
        if found != BRIDGE_VERSION:
            raise ConfigError(f"--provider {BRIDGE}: version {found} is installed; only {BRIDGE_VERSION} was looked at")
        self._bridge: Any = importlib.import_module("megatron.bridge").AutoBridge

    def hf_to_megatron(self, source: Path, target: Path, options: Options, say: Callable[[str], None]) -> None:
        self._refuse(source, options)
        with new_folder(target.parent, target.name, tracker=None) as folder:
            self._bridge.import_ckpt(str(source), str(folder))
            for each in checkpoints_in(folder):
                check(each)
        say(f"wrote {target}")

    def megatron_to_hf(self, source: Path, target: Path, options: Options, say: Callable[[str], None]) -> None:
        if options.config is None:
            raise CheckpointError(f"--provider {BRIDGE} needs --config, the Hugging Face folder the model came from")
        self._refuse(options.config, options)
        for each in checkpoints_in(source):
            check(each)
            refuse_calls(each / RUN_CONFIG)
        bridge = self._bridge.from_hf_pretrained(str(options.config))
        with new_folder(target.parent, target.name, tracker=None) as folder:
            bridge.export_ckpt(str(source), str(folder), show_progress=False, strict=True)
            refuse_incomplete(folder, options.config)
        say(f"wrote {target}")

    def _refuse(self, model: Path, options: Options) -> None:
        if options.dtype is not None or options.tensor != 1 or options.processes != 1 or options.dry:
            raise ConfigError(f"--provider {BRIDGE} takes none of --dtype, --tensor, --processes and --dry-run")
        if not self._bridge.can_handle(str(model)):
            raise ConfigError(f"--provider {BRIDGE}: {BRIDGE} {BRIDGE_VERSION} does not know the model of {model}")


def checkpoints_in(folder: Path) -> list[Path]:
    """The distributed checkpoints that Megatron-Bridge may read of a folder: `iter_*` below it, else itself."""
    found = sorted(path for path in folder.glob("iter_*") if path.is_dir()) or [folder]
    absent = [path for path in found if not (path / METADATA).exists()]
    if absent:
        raise CheckpointError(f"{absent[0]}: no distributed checkpoint of Megatron-Core; it has no {METADATA}")
    return found


def refuse_calls(run_config: Path) -> None:
    """Megatron-Bridge calls whatever a checkpoint's configuration names. Raises CheckpointError for a name that is not
    a configuration of Megatron's."""
    if not run_config.exists():
        return
    try:
        held = yaml.safe_load(run_config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError) as error:
        raise CheckpointError(f"{run_config} is no YAML of plain values") from error
    for target, called in targets(held):
        if not (CALLED if called else NAMED).fullmatch(target):
            raise CheckpointError(f"{run_config} asks for {target}, which no configuration of Megatron-Bridge needs")


def targets(held: Any) -> Iterator[tuple[str, bool]]:
    """Every `_target_`, and whether it would be called."""
    if isinstance(held, dict):
        if "_target_" in held:
            yield str(held["_target_"]), held.get("_call_", True) is not False
        held = list(held.values())
    for each in held if isinstance(held, list) else ():
        yield from targets(each)


def refuse_incomplete(folder: Path, model: Path) -> None:
    """Raises CheckpointError where the exported folder lacks a tensor of the model it came from, or has another."""
    written, wanted = ({name: tensor.shape for name, tensor in hf_tensors(each).items()} for each in (folder, model))
    wrong = sorted(name for name in wanted.keys() | written.keys() if wanted.get(name) != written.get(name))
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointError(
            f"{BRIDGE} wrote other tensors, or other shapes, than {model} has: {', '.join(wrong[:SHOWN])}{more}"
        )
