"""Names and arguments of Transformer Engine, read from its wheel without importing or installing it.

pip download --no-deps transformer-engine
python -m tests.unit.transformer_engine_names transformer_engine-*.whl > tests/unit/transformer_engine_names.json
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

FILES = {
    "common/recipe/__init__.py": ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"),
    "pytorch/module/layernorm_linear.py": ("LayerNormLinear",),
    "pytorch/module/linear.py": ("Linear",),
    "pytorch/module/grouped_linear.py": ("GroupedLinear",),
    "pytorch/attention/dot_product_attention/dot_product_attention.py": ("DotProductAttention",),
    "pytorch/optimizers/fused_adam.py": ("FusedAdam",),
    "pytorch/quantization.py": ("fp8_autocast", "fp8_model_init"),
}
"""What Megatron-Core uses of each file."""


def names_of(wheel: Path) -> dict[str, list[str]]:
    """Arguments of the classes and functions of FILES, under their names; of a class also those of `forward`."""
    found: dict[str, list[str]] = {"version": [wheel.name.split("-")[1]]}
    with zipfile.ZipFile(wheel) as archive:
        for file, names in FILES.items():
            signatures = dict(_signatures(ast.parse(archive.read(f"transformer_engine/{file}")).body))
            found |= {name: arguments for name, arguments in signatures.items() if name.split(".")[0] in names}
    return found


def _signatures(body: Sequence[ast.stmt]) -> Iterator[tuple[str, list[str]]]:
    for node in body:
        match node:
            case ast.ClassDef(name=name, body=members) if not name.startswith("_"):
                fields = [
                    m.target.id for m in members if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)
                ]
                for member in members:
                    if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                        fields = _arguments(member)
                    if isinstance(member, ast.FunctionDef) and member.name == "forward":
                        yield f"{name}.forward", _arguments(member)
                yield name, fields
            case ast.FunctionDef(name=name) if not name.startswith("_"):
                yield name, _arguments(node)


def _arguments(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


if __name__ == "__main__":
    print(json.dumps(names_of(Path(sys.argv[1])), indent=1, sort_keys=True))
