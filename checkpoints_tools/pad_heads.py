"""More attention heads without another function: for tensor parallelism that a model's own heads do not allow.

`python -m checkpoints_tools.pad_heads FOLDER TARGET --kv-heads N` writes a Hugging Face folder with N key-value heads
and as many query heads for each as before. The new ones are zero: their values are zero, so nothing passes through
them, and so are the gradients of all their weights, so training keeps them zero. With fewer heads than there are, it
removes zero ones again. SmolLM2-135M has 9 heads on 3 key-value heads; with 4 it has 12, which 2 or 4 processes share.
"""

import json
import re
import shutil
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gppo_megatron.config.architecture import read_architecture
from gppo_megatron.errors import CheckpointError, ConfigError, GppoError
from gppo_megatron.policy.megatron.hf_folder import SIDE_FILES, HfReader, write_hf_folder

MOST_TIMES = 8
PROJECTION = re.compile(r"\.self_attn\.([qkvo])_proj\.(weight|bias)$")


def pad_heads(folder: Path, target: Path, kv_heads: int) -> tuple[int, int]:
    """Write `target`; returns its heads and key-value heads.

    Raises ConfigError for a number out of bounds, CheckpointError for heads that are not zero
    and would be removed, a folder that is unsupported or incomplete, or a target that exists.
    """
    architecture = read_architecture(folder)
    most = MOST_TIMES * architecture.kv_heads
    if not 1 <= kv_heads <= most:
        raise ConfigError(f"--kv-heads: must be 1 to {most}, as the model has {architecture.kv_heads} (got {kv_heads})")
    group = architecture.heads // architecture.kv_heads
    reader = HfReader(folder)
    with tempfile.TemporaryDirectory() as scratch:
        for name in SIDE_FILES:
            if (folder / name).exists():
                shutil.copy(folder / name, scratch)
        config_file = Path(scratch) / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        config |= {
            "num_attention_heads": group * kv_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": architecture.head_dim,
        }
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        write_hf_folder(target, _resized(reader, architecture.head_dim, group, kv_heads), Path(scratch))
    return group * kv_heads, kv_heads


def _resized(reader: HfReader, head_dim: int, group: int, kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(reader.names):
        tensor = reader.read(name)
        found = PROJECTION.search(name)
        if found is not None:
            projection, kind = found.groups()
            size = head_dim * kv_heads * (group if projection in "qo" else 1)
            if projection == "o" and kind == "weight":
                tensor = _resize(name, tensor.T, size).T
            elif projection != "o":
                tensor = _resize(name, tensor, size)
        yield name, tensor


def _resize(name: str, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """With zero rows added at the end, or removed from there. Raises CheckpointError for rows that are not zero."""
    if rows <= len(tensor):
        if torch.count_nonzero(tensor[rows:]):
            raise CheckpointError(f"{name}: the heads to be removed are not zero; they are part of the model")
        return tensor[:rows]
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = ArgumentParser(
        prog="python -m checkpoints_tools.pad_heads",
        description="Add attention heads that are zero, so that more processes can share the model; or remove them.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("target", type=Path, help="the folder to write")
    parser.add_argument("--kv-heads", type=int, required=True, help="key-value heads that it is to have")
    options = parser.parse_args(arguments)
    try:
        heads, kv_heads = pad_heads(options.folder, options.target, options.kv_heads)
    except GppoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"wrote {options.target}: {heads} heads on {kv_heads} key-value heads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
