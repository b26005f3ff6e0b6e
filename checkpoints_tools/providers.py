"""Who converts: this project's own mapping table, or Megatron-Bridge for the families that the table lacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from checkpoints_tools import convert
from checkpoints_tools.bridge import BRIDGE, MegatronBridge
from checkpoints_tools.convert import Options


class Provider(Protocol):
    """Both raise ConfigError or CheckpointError; then `target` does not exist."""

    def hf_to_megatron(self, source: Path, target: Path, options: Options, say: Callable[[str], None]) -> None: ...

    def megatron_to_hf(self, source: Path, target: Path, options: Options, say: Callable[[str], None]) -> None: ...


class Builtin:
    """The mapping table; tensor by tensor."""

    def hf_to_megatron(self, source: Path, target: Path, options: Options, say: Callable[[str], None]) -> None:
        convert.hf_to_megatron(source, target, options, say)

    def megatron_to_hf(self, source: Path, target: Path, options: Options, say: Callable[[str], None]) -> None:
        convert.megatron_to_hf(source, target, options, say)


PROVIDERS: dict[str, type[Builtin] | type[MegatronBridge]] = {"builtin": Builtin, BRIDGE: MegatronBridge}
