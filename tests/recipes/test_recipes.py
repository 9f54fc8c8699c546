"""The recipes as files: what a reader and the launcher find there."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from ttlaunch.spec.recipe.importing import import_recipe_module

RECIPES = sorted(path.parent for path in (Path(__file__).parents[2] / "recipes").glob("*/recipe.py"))
recipes = pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)


def keys_of(section, prefix=""):
    for name, value in section:
        yield from keys_of(value, f"{prefix}{name}.") if hasattr(value, "model_fields_set") else [f"{prefix}{name}"]


def entries_of(values, prefix=""):
    for name, value in values.items():
        yield from entries_of(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]


@recipes
def test_the_default_configuration_loads_and_names_only_keys_that_are_read(folder):
    """A10; bug 24: configuration keys that nothing reads."""
    recipe = import_recipe_module(folder, "recipe").RECIPE
    values = yaml.safe_load((folder / "train.yaml").read_text())
    recipe.config.model_validate(values)
    given = set(entries_of(values))
    assert not [key for key in given if any(key.startswith(unread) for unread in recipe.unread)]


@recipes
def test_every_key_of_the_default_configuration_says_what_it_means(folder):
    for line in (folder / "train.yaml").read_text().splitlines():
        assert not re.match(r"\s*\w+: \S", line) or " # " in line, line


@recipes
def test_every_training_key_stands_in_the_default_configuration(folder):
    config = import_recipe_module(folder, "recipe").RECIPE.config.model_validate(
        yaml.safe_load((folder / "train.yaml").read_text())
    )
    given = set(entries_of(yaml.safe_load((folder / "train.yaml").read_text())))
    expected = {key for key in keys_of(config) if key.startswith(("training_", "transformer_", "scheduler_", "all_"))}
    assert expected <= given


@recipes
def test_the_declaration_needs_no_torch(folder):
    """The launcher reads it in a tenth of a second."""
    for path in (folder / "recipe.py", folder / "traffic.py"):
        tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert modules <= {"collections.abc", "itertools", "typing", "pydantic", "ttlaunch.recipe", "traffic"}
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]


@recipes
def test_every_role_has_a_function(folder):
    recipe = import_recipe_module(folder, "recipe").RECIPE
    functions = {
        node.name for node in ast.parse((folder / "trainer.py").read_text()).body if isinstance(node, ast.FunctionDef)
    }
    assert {role for layout in recipe.layouts for role in layout.roles} <= functions


@recipes
def test_a_recipe_is_short_enough_to_read(folder):
    # Up to 60 where keys need no marks of their own; a key that says how bits depend on it takes two lines more.
    assert len((folder / "recipe.py").read_text().splitlines()) <= 60 + 2 * (folder / "recipe.py").read_text().count(
        "Bits.FREE"
    )
    assert len((folder / "trainer.py").read_text().splitlines()) <= 150
    assert (folder / "README.md").exists()
