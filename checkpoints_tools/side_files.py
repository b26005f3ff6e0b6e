"""What a Hugging Face folder holds beside its weights: carried along byte for byte."""

import json
import shutil
from pathlib import Path

from gppo_megatron.errors import CheckpointError

HF = "hf"
"""The folder of a distributed checkpoint that holds the side files."""
WEIGHTS = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack",
)  # fmt: skip
BOOKKEEPING = ("manifest.json",)


def side_files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and not file.name.endswith(WEIGHTS) and file.name not in BOOKKEEPING
    )


def copy_side_files(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for file in side_files(source):
        shutil.copyfile(file, target / file.name)


def model_files(folder: Path) -> Path:
    """Where a model folder of either kind keeps its config.json. Raises CheckpointError for a folder without."""
    for place in (folder, folder / HF):
        if (place / "config.json").is_file():
            return place
    raise CheckpointError(f"{folder}: no config.json, here or in {HF}/; name the model's own folder with --config")


def declare_dtype(config_file: Path, dtype: str) -> None:
    """Have config.json name the weights' dtype, as torch does: transformers casts to the one it finds there, and takes
    weights for quantized ones where it says so."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
