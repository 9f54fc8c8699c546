"""The recipes as files: what a reader and the launcher find there."""

import ast
import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from ttlaunch.spec.located.schema import section_in
from ttlaunch.spec.recipe.config import check_config, load_config, render_commented
from ttlaunch.spec.recipe.declare import Per
from ttlaunch.spec.recipe.importing import import_recipe_module

RECIPES = sorted(path.parent for path in (Path(__file__).parents[2] / "recipes").glob("*/recipe.py"))
recipes = pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)


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


def written_and_meant(folder):
    """Every key of the recipe's `train.yaml` with its value, and every field of its definition, by dotted name."""
    recipe = import_recipe_module(folder, "recipe").RECIPE
    fields = dict(fields_of(recipe.config))
    values = yaml.safe_load((folder / "train.yaml").read_text())
    return dict(leaves_of(values, fields)), fields, recipe


def sections_that_are_null(values, prefix=""):
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        if value is None and section_in(field.annotation):
            yield f"{prefix}{name}"
        elif isinstance(value, BaseModel):
            yield from sections_that_are_null(value, f"{prefix}{name}.")


def fields_of(model, prefix=""):
    for name, field in model.model_fields.items():
        section = section_in(field.annotation)
        yield from fields_of(section, f"{prefix}{name}.") if section else [(f"{prefix}{name}", (field, model))]


def leaves_of(values, fields, prefix=""):
    for name, value in values.items():
        key = f"{prefix}{name}"
        yield from [(key, value)] if key in fields else leaves_of(value, fields, f"{key}.")


def counted_by(recipe):
    """The keys that say how many ranks there are: whoever runs a recipe wants to see them, and P002 and P003 show their place."""
    numbers = [number for layout in recipe.layouts for number in layout.roles.values()]
    counted = {key for number in numbers if isinstance(number, Per) for key in (number.key, *number.times)}
    return counted | ({"multihost_config.num_workers"} if None in numbers else set())


@recipes
def test_the_training_file_holds_what_differs_from_the_defaults_and_what_the_recipe_is_about(folder):
    """So that a new shared key touches no recipe."""
    written, fields, recipe = written_and_meant(folder)
    for key, value in written.items():
        field, section = fields[key]
        is_own = not section.__module__.startswith("ttlaunch.")
        assert value != field.get_default() or is_own or key in counted_by(recipe), f"{key} is {value} anyway"
    assert {key for key in counted_by(recipe) if key in fields} <= set(written)


@recipes
def test_a_copy_has_every_key_with_its_meaning_and_is_the_same_configuration(folder, tmp_path):
    recipe = import_recipe_module(folder, "recipe").RECIPE
    loaded = load_config(recipe, folder / "train.yaml")
    (tmp_path / "train.yaml").write_text(render_commented(recipe, loaded))
    copied = load_config(recipe, tmp_path / "train.yaml")
    assert (copied.config, copied.diagnostics) == (loaded.checked, ())
    assert [] == check_config(recipe, copied, recipe.layouts[-1])
    _, fields, _ = written_and_meant(folder)
    unread = (*recipe.unread, "multihost_config.num_workers" if folder.name == "pipeline_parallel" else "-")
    without = list(sections_that_are_null(loaded.checked))
    for key, (field, _) in fields.items():
        is_left_out = f"{key}.".startswith(tuple(f"{name}." for name in (*unread, *without)))
        assert (copied.span(key) is None) is is_left_out, key
        meaning = copied.comment(key) or "-"
        assert is_left_out or meaning == loaded.comment(key) or meaning.endswith(field.description)


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
    body = ast.parse((folder / "trainer.py").read_text()).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    functions |= {one.name for node in body if isinstance(node, ast.ImportFrom) and node.level for one in node.names}
    layouts = [*recipe.layouts, *recipe.in_elastic_form().layouts]
    assert {role for layout in layouts for role in layout.roles} <= functions


@recipes
def test_a_recipe_is_short_enough_to_read(folder):
    # Up to 60 lines and six for the naive form; a key that says how bits depend on it takes two more, a layout for elastic runs ten,
    # and that its ranks audit each other two.
    declaration = (folder / "recipe.py").read_text()
    allowed = 66 + 2 * declaration.count("Bits.FREE") + 10 * declaration.count('Layout("members"')
    allowed += 2 * declaration.count("Audited(")
    assert len(declaration.splitlines()) <= allowed
    assert 60 <= len((folder / "trainer.py").read_text().splitlines()) <= 130
    assert (folder / "README.md").exists()


def test_no_module_of_the_program_has_a_list_of_recipes():
    """So that a built-in recipe is its folder, its tests, and what the documentation says of it.

    Four modules know some by name, of which a new one need not be: the layouts that `parity` compares, what the
    training guide calls the algorithms that it has, the recipe that `ttlaunch serve` runs, and the one whose sections
    `advise` takes first. The list of commands has the word, too.
    """
    root = Path(__file__).parents[2]
    names = {folder.name for folder in RECIPES}
    texts = {path: path.read_text(encoding="utf-8") for path in (root / "ttlaunch").rglob("*.py")}
    known = {
        str(path.relative_to(root / "ttlaunch"))
        for path, text in texts.items()
        if any(f'"{name}"' in text for name in names)  # few are worth parsing
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert known == {"app/serve.py", "cli/main.py", "lab/advise.py", "planning/parity.py", "running/metrics/names.py"}
