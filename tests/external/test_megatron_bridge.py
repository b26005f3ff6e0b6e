"""The stand-in for Megatron-Bridge has the real one's signatures, read from its source: it does not import on a CPU."""

import ast
import importlib.metadata
import inspect

import pytest

from checkpoints_tools.bridge import BRIDGE, BRIDGE_VERSION
from tests.auto_bridge import AutoBridge

SOURCE = "megatron/bridge/models/conversion/auto_bridge.py"


def real() -> dict[str, ast.FunctionDef]:
    (file,) = (file for file in importlib.metadata.files(BRIDGE) or [] if str(file) == SOURCE)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "AutoBridge")
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", ["can_handle", "from_hf_pretrained", "import_ckpt", "export_ckpt"])
def test_the_stand_in_has_the_real_signature(name: str) -> None:
    assert importlib.metadata.version(BRIDGE) == BRIDGE_VERSION
    theirs, ours = real()[name], inspect.signature(getattr(AutoBridge, name))
    expected = [argument.arg for argument in theirs.args.args if argument.arg != "cls"]
    expected += [theirs.args.kwarg.arg] if theirs.args.kwarg else []
    assert list(ours.parameters) == expected
    defaults = [ast.literal_eval(default) for default in theirs.args.defaults]
    held = [p.default for p in ours.parameters.values() if p.default is not inspect.Parameter.empty]
    assert held == defaults
    is_class_method = any(isinstance(d, ast.Name) and d.id == "classmethod" for d in theirs.decorator_list)
    assert is_class_method == inspect.ismethod(getattr(AutoBridge, name))
