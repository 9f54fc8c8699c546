"""Benchmarks run for minutes and rarely, so what they import is looked at here: a name that has moved shows at once."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
MODULE = re.compile(r"(agent|cli|launch|plan|remote|runtime)/[a-z_/]+(\.py)?")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_of_ttlaunch_is_there(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    missing = [
        f"{node.module}.{alias.name}"
        for node in imports
        if node.module.startswith("ttlaunch")
        for alias in node.names
        if not _is_there(node.module, alias.name)
    ]
    assert missing == []


def _is_there(module, name):
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (is_package and importlib.util.find_spec(f"{module}.{name}") is not None)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_modules_that_a_benchmark_names_by_their_path_are_there(path):
    texts = [
        node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Constant)
    ]
    named = [text for text in texts if isinstance(text, str) and MODULE.fullmatch(text)]
    package = FOLDER.parent / "ttlaunch"
    assert [] == [name for name in named if not (package / f"{name.removesuffix('.py')}.py").is_file()]
