"""Whether a model can be cut over so many processes."""

from dataclasses import dataclass

from gppo_megatron.config.architecture import Architecture


@dataclass(frozen=True)
class Cuts:
    """tensor: parts of each layer. pipeline: parts of the stack of layers."""

    tensor: int = 1
    pipeline: int = 1


def cut_problems(architecture: Architecture, cuts: Cuts) -> list[str]:
    """Numbers that the cuts do not divide, one clause each. The vocabulary is padded, so it always divides."""
    a = architecture
    checks = [
        ("tensor", cuts.tensor, "attention heads", a.heads),
        ("tensor", cuts.tensor, "rows of the MLP", a.ffn),
        ("pipeline", cuts.pipeline, "layers", a.layers),
    ]
    if cuts.tensor <= a.kv_heads:
        checks.append(("tensor", cuts.tensor, "key-value heads", a.kv_heads))
    problems = [
        f"--{name} {size} does not divide the {count} {what}" for name, size, what, count in checks if count % size
    ]
    if cuts.tensor > a.kv_heads and cuts.tensor % a.kv_heads:
        problems.append(f"--tensor {cuts.tensor} is no multiple of the {a.kv_heads} key-value heads")
    return problems
