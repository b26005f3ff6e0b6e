"""Rules of the house that a linter does not know."""

import ast
from pathlib import Path

import pytest

from gppo_megatron.config.checks import check
from gppo_megatron.config.load import load

ROOT = Path(__file__).parents[2]
PACKAGES = ("gppo_megatron", "launchers", "checkpoints_tools", "verifiers")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
RECIPES = sorted((ROOT / "launchers" / "recipes").glob("*.yaml"))
CONDITIONALS = (ast.If, ast.IfExp, ast.Match, ast.BoolOp, ast.While, ast.Try)


def test_the_train_loop_reads_as_the_algorithm() -> None:
    tree = ast.parse((ROOT / "gppo_megatron" / "train.py").read_text())
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "train"]
    conditionals = [node for node in ast.walk(loop) if isinstance(node, CONDITIONALS)]
    filters = [node for node in ast.walk(loop) if isinstance(node, ast.comprehension) and node.ifs]
    assert len(conditionals) + len(filters) <= 2


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_well_named(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert not {"utils", "common", "helpers", "misc"} & {path.stem, *path.relative_to(ROOT).parent.parts}


def test_the_verifiers_folder_leaves_its_name_to_others() -> None:
    assert not (ROOT / "verifiers" / "__init__.py").exists()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_loads(recipe: Path) -> None:
    check(load(recipe, []), source=str(recipe))
