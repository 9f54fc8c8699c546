"""Benchmarks run for minutes and rarely, so what they import is looked at here: a name that has moved shows at once."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
MODULE = re.compile(r"(agent|cli|launch|plan|remote|runtime)/[a-z_/]+(\.py)?")


@pytest.fixture(scope="module")
def nodes():
    """By benchmark, what its source is made of."""
    return {path.name: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in FOLDER.glob("*.py")}


def test_what_a_benchmark_imports_of_ttlaunch_is_there(nodes):
    imported = {
        (benchmark, node.module, alias.name)
        for benchmark, found in nodes.items()
        for node in found
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ttlaunch")
        for alias in node.names
    }
    assert [] == [
        f"{benchmark}: {module}.{name}" for benchmark, module, name in sorted(imported) if not _is_there(module, name)
    ]


def _is_there(module, name):
    found = importlib.import_module(module)
    is_package = hasattr(found, "__path__")
    return hasattr(found, name) or (is_package and importlib.util.find_spec(f"{module}.{name}") is not None)


def test_the_modules_that_a_benchmark_names_by_their_path_are_there(nodes):
    texts = {
        (benchmark, node.value)
        for benchmark, found in nodes.items()
        for node in found
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    package = FOLDER.parent / "ttlaunch"
    named = sorted((benchmark, text) for benchmark, text in texts if MODULE.fullmatch(text))
    assert [] == [one for one in named if not (package / f"{one[1].removesuffix('.py')}.py").is_file()]
