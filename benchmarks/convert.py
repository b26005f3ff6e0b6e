"""Peak memory and rate of conversions of a random 4 GiB checkpoint, against a plain copy of its safetensors files.

`python benchmarks/convert.py FOLDER` needs 16 GiB of room below FOLDER, and removes what it writes. Every line is
measured in a process of its own. Linux.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checkpoints_tools.convert import Options, hf_to_megatron, megatron_to_hf
from gppo_megatron.checkpoint.folder import sync
from gppo_megatron.checkpoint.headers import hf_tensors

MIB = 2**20
ALLOWANCE_MIB = 400
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32768, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 15, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """processor: seconds of this process. peak, base: MiB of resident memory at most, and before, all imported."""

    seconds: float
    processor: float
    base: float
    peak: float


def shapes() -> dict[str, tuple[int, ...]]:
    hidden, ffn, kv = 2048, 8192, 1024
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32768, hidden)}
    for layer in range(15):
        name = f"model.layers.{layer}"
        found |= {f"{name}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        found |= {f"{name}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qo"}
        found |= {f"{name}.self_attn.{part}_proj.weight": (kv, hidden) for part in "kv"}
        found |= {f"{name}.mlp.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
        found[f"{name}.mlp.down_proj.weight"] = (hidden, ffn)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (32768, hidden)}


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    names, file_of = list(shapes()), {}
    for part in range(5):
        held = names[part::5]
        file = f"model-{part + 1:05d}-of-00005.safetensors"
        save_file({n: torch.empty(shapes()[n]).uniform_(-1, 1, generator=generator) for n in held}, folder / file)
        file_of |= dict.fromkeys(held, file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def copy(source: Path, target: Path, processes: int) -> None:
    """With an fsync of each file, as a conversion does."""
    target.mkdir()
    for file in sorted(source.glob("*.safetensors")):
        save_file(load_file(file), target / file.name)
        sync(target / file.name)


def into(source: Path, target: Path, processes: int) -> None:
    hf_to_megatron(source, target, Options(processes=processes), lambda _: None)


def back(source: Path, target: Path, processes: int) -> None:
    megatron_to_hf(source, target, Options(processes=processes), lambda _: None)


WORK: dict[str, Callable[[Path, Path, int], None]] = {"copy": copy, "hf-to-megatron": into, "megatron-to-hf": back}


def memory(what: str) -> float:
    """MiB: VmRSS now, or VmHWM at most so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def measure(work: str, source: Path, target: Path, processes: int = 1) -> Measurement:
    arguments = ["--one", work, str(source), str(target), str(processes)]
    done = subprocess.run([sys.executable, "-W", "ignore", __file__, *arguments], check=True, stdout=subprocess.PIPE)
    return Measurement(**json.loads(done.stdout))


def measure_here(work: str, source: Path, target: Path, processes: int) -> None:
    base, start, before = memory("VmRSS"), time.perf_counter(), time.process_time()
    WORK[work](source, target, processes)
    seconds, processor = time.perf_counter() - start, time.process_time() - before
    print(json.dumps({"seconds": seconds, "processor": processor, "base": base, "peak": memory("VmHWM")}))


def report(name: str, found: Measurement, plain: Measurement, size: float) -> None:
    """name: ends with the number of processes; with several, only the first one's memory and time are known."""
    rate, share = size / found.seconds, plain.seconds / found.seconds
    print(f"{name:24} {rate:6.0f} {share:10.2f} {found.processor:12.1f} {found.peak - found.base:22.0f}", flush=True)


def main(root: Path) -> int:
    hf, megatron = root / "hf", root / "megatron"
    make(hf)
    tensors = hf_tensors(hf).values()
    size, largest = sum(t.bytes for t in tensors) / MIB, max(t.bytes for t in tensors) / MIB
    bound = 2 * largest + ALLOWANCE_MIB
    print(f"{size / 1024:.2f} GiB, largest tensor {largest:.0f} MiB; bound {bound:.0f} MiB over the imports")
    print(f"{'':24} {'MiB/s':>6} {'of a copy':>10} {'processor s':>12} {'MiB over the imports':>22}")
    plain = measure("copy", hf, root / "copy")
    shutil.rmtree(root / "copy")
    report("safetensors copy, 1", plain, plain, size)
    worst = 0.0
    for work, source, target in (("hf-to-megatron", hf, megatron), ("megatron-to-hf", megatron, root / "back")):
        for processes in (2, 1):
            shutil.rmtree(target, ignore_errors=True)
            found = measure(work, source, target, processes)
            report(f"{work}, {processes}", found, plain, size)
        worst = max(worst, found.peak - found.base)
    shutil.rmtree(root)
    return 0 if worst < bound else 1


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        measure_here(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main(Path(sys.argv[1])))
