"""Which recipe a name means, and that its code is loaded from its own folder."""

import subprocess
import sys

import pytest

from ttlaunch.diagnostics import Blame, Diagnostic, render
from ttlaunch.recipe import ConfigFile, Layout, Recipe, TrainingFile, per
from ttlaunch.spec.recipe.discovery import find_recipe, list_recipes, load_recipe

DECLARATION = """\
from ttlaunch.recipe import ConfigFile, Layout, Recipe

RECIPE = Recipe(summary="{summary}", config=ConfigFile, layouts=[Layout("all", peer=None)], uses_data=False)
"""


def make_recipe(folder, summary="Mine."):
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text(DECLARATION.format(summary=summary))
    (folder / "trainer.py").write_text(
        "def peer(cfg, ctx): ...\nraise RuntimeError('the launcher must not import this')\n"
    )


def test_built_in_recipes_are_found_from_anywhere(here):
    assert {r.name for r in list_recipes(here)} >= {"fabric_minimal", "hierarchical_parallel", "pipeline_parallel"}
    assert all(recipe.built_in for recipe in list_recipes(here))


def test_a_recipe_of_the_current_folder_hides_the_built_in_one(here):
    make_recipe(here / "recipes/fabric_minimal")
    found = find_recipe("fabric_minimal", working_folder=here)
    assert (found.built_in, load_recipe(found).summary) == (False, "Mine.")


@pytest.mark.parametrize("name", ["mine", "./mine", "mine/", "deep/er/mine", "with space/it's $mine"])
def test_a_recipe_is_found_by_path(here, name):
    make_recipe(here / name)
    found = find_recipe(name, working_folder=here)
    assert found.folder == (here / name).resolve()
    assert load_recipe(found).summary == "Mine."


def test_what_a_function_binds_is_no_role_of_the_trainer(here):
    make_recipe(here / "mine")
    (here / "mine/trainer.py").write_text("def pear(cfg, ctx):\n    peers = 2\n    for peer in range(peers): ...\n")
    refusal = load_recipe(find_recipe("mine", working_folder=here))
    assert "recipe `mine` has no function for `peer` in trainer.py" == refusal.message
    assert ("is `pear` meant to be `peer`?",) == refusal.hints


GOOD = DECLARATION.format(summary="Mine.")
ROLE = "def peer(cfg, ctx): ...\n"


NULL = "cannot be read: SyntaxError: source code string cannot contain null bytes"
UNUSABLE = {
    "one letter": ("1\nx\n", ROLE, "cannot be read: NameError: name 'x' is not defined", "recipe.py:2:1", "2 | x", "^"),
    "indented": (
        "if 1:\n    y = 1 / 0\n",
        ROLE,
        "cannot be read: ZeroDivisionError: division by zero",
        "recipe.py:2:5",
        "2 |     y = 1 / 0",
        "    ^^^^^^^^^",
    ),
    "long reason": (
        "raise ValueError('a' * 300)\n",
        ROLE,
        f"cannot be read: ValueError: {'a' * 199}…",
        "recipe.py:1:1",
        "1 | raise ValueError('a' * 300)",
        "^" * 27,
    ),
    "exit": (
        "import sys\n\nsys.exit(3)",
        ROLE,
        "cannot be read: SystemExit: 3",
        "recipe.py:3:1",
        "3 | sys.exit(3)",
        "^" * 11,
    ),
    "no text": ("\0\n", ROLE, NULL, "recipe.py:1:1", "1 | \\x00", "^^^^"),
    "another name": (
        "recipe = 1\n",
        ROLE,
        "declares nothing",
        "recipe.py:1:1",
        "1 | recipe = 1",
        "^^^^^^^^^^ no `RECIPE = Recipe(…)` in this file",
    ),
    "trainer that is no text": (GOOD, "def peer():\n\0\n", NULL, "trainer.py:1:1", "1 | def peer():", "^"),
    "missing roles": (
        GOOD.replace("peer=None", "peer=None, server=1, watcher=1"),
        "def server(cfg, ctx): ...\n",
        "has no function for `peer` and `watcher` in trainer.py",
        "trainer.py:1:1",
        "1 | def server(cfg, ctx): ...",
        f"{'^' * 25} each role is a function: `peer`, `server` and `watcher`",
    ),
}


@pytest.mark.parametrize(
    ("declaration", "trainer", "message", "place", "line", "mark"), UNUSABLE.values(), ids=UNUSABLE
)
def test_a_recipe_that_cannot_be_used_is_reported_at_its_line(here, declaration, trainer, message, place, line, mark):
    (here / "mine").mkdir()
    (here / "mine/recipe.py").write_text(declaration)
    (here / "mine/trainer.py").write_text(trainer)
    refusal = load_recipe(find_recipe("mine", working_folder=here))
    found = render([refusal])
    expected = f"error[P006]: recipe `mine` {message}\n --> {place}\n  |\n{line}\n  | {mark}"
    assert expected == found.replace(f"{(here / 'mine').resolve()}/", "").rstrip("\n")
    if message.startswith("cannot be read: NameError"):
        assert 1 == refusal.primary.span.length  # of a line with one letter; a picture shows no more of it anyway


IMPORTS = {
    "own module": ("from .recipe import Config", "Config", ".recipe", 21, "ConfigFile"),
    "own module, misspelled": ("from .recipe import RECIPEE", "RECIPEE", ".recipe", 21, "RECIPE"),
    "no such module": ("from .data import load", "load", ".data", 19, ""),
    "no such file": ("from . import data", "data", ".", 15, ""),
    "ttlaunch.train": ("from ttlaunch.train import RankContxt", "RankContxt", "ttlaunch.train", 28, "RankContext"),
    "ttlaunch.recipe": ("from ttlaunch.recipe import (\n    Recipee,\n)", "Recipee", "ttlaunch.recipe", 5, "Recipe"),
    "no such part": ("from ttlaunch.trian import agree", "agree", "ttlaunch.trian", 28, ""),
    "in a function": ("def f():\n    from .recipe import Config", "Config", ".recipe", 25, "ConfigFile"),
}


@pytest.mark.parametrize(("text", "name", "module", "column", "near"), IMPORTS.values(), ids=IMPORTS)
def test_a_trainer_imports_only_names_that_are_there(here, text, name, module, column, near):
    make_recipe(here / "mine")
    (here / "mine/trainer.py").write_text(f"{ROLE}{text}\n")
    refusal = load_recipe(find_recipe("mine", working_folder=here))
    assert f"recipe `mine` cannot be read: there is no `{name}` in `{module}`" == refusal.message
    assert (column, len(name)) == (refusal.primary.span.column, refusal.primary.span.length)
    assert ((f"did you mean `{near}`?",) if near else ()) == refusal.hints


@pytest.mark.parametrize(
    "text",
    [
        "from .recipe import RECIPE, Layout",
        "from . import data, recipe, more",
        "from .data import ROWS, pixels, Label",
        "from .more import one\nfrom .more.two import deep",
        "from .lazy import whatever",
        "from .stars import anything",
        "from ttlaunch.train import RankContext, SyncLink as Link",
        "from ttlaunch import train, recipe\nimport ttlaunch.train\nfrom ttlaunch.recipe import *",
        "try:\n    from .recipe import Config\nexcept ImportError:\n    Config = None",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .recipe import Config",
        "import nowhere\nfrom nowhere.else_ import name",
    ],
)
def test_a_trainer_may_import_what_is_there_and_what_only_a_rank_can_tell(here, text):
    make_recipe(here / "mine")
    (here / "mine/data.py").write_text("import os.path\nfor ROWS, pixels in []: ...\nclass Label: ...\n")
    (here / "mine/lazy.py").write_text("def __getattr__(name): return 1\n")
    (here / "mine/stars.py").write_text("from math import *\n")
    (here / "mine/more").mkdir()
    (here / "mine/more/__init__.py").write_text("one = 1\n")
    (here / "mine/more/two.py").write_text("deep = 2\n")
    (here / "mine/trainer.py").write_text(f"{ROLE}{text}\n")
    assert isinstance(load_recipe(find_recipe("mine", working_folder=here)), Recipe)


@pytest.mark.parametrize("package", ["torch", "mpi4py"])
@pytest.mark.parametrize("text", ["import {0}", "from {0} import any_name", "import helper"])
def test_a_declaration_is_read_without_the_packages_of_ranks(here, package, text):
    make_recipe(here / "mine")
    (here / "helper.py").write_text(f"import {package}.part\n")
    path = here / "mine/recipe.py"
    path.write_text(f"{text.format(package)}\n{path.read_text()}")
    program = (
        "import sys\nfrom pathlib import Path\nfrom ttlaunch.diagnostics import render\n"
        "from ttlaunch.spec.recipe.discovery import find_recipe, load_recipe\n"
        "print(render([load_recipe(find_recipe('mine', working_folder=Path.cwd()))]), 'torch' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    reason = f"ImportError: `recipe.py` is read without {package}; import it in `trainer.py`"
    assert f"error[P006]: recipe `mine` cannot be read: {reason}\n" in found
    assert f"{path.resolve()}:1:1\n" in found
    assert found.endswith("False\n")


def test_a_recipe_without_a_trainer_that_can_be_read_is_reported_without_a_line(here):
    make_recipe(here / "mine")
    found = find_recipe("mine", working_folder=here)
    (here / "mine/trainer.py").write_bytes(b"\xff")
    message = "recipe `mine` cannot be read: trainer.py: 'utf-8' codec can't decode byte 0xff in position 0: invalid…"
    assert Diagnostic("P006", message) == load_recipe(found)
    (here / "mine/trainer.py").unlink()
    notes = (f"looked in {(here / 'mine').resolve()}",)
    assert Diagnostic("P006", "recipe `mine` has no `trainer.py`", notes=notes) == load_recipe(found)


def test_a_folder_without_a_declaration_is_no_recipe(here):
    (here / "mine").mkdir()
    found = find_recipe("./mine", working_folder=here)
    assert ("P001", "the folder ./mine holds no `recipe.py`, so it is no recipe") == (found.code, found.message)
    assert ("`ttlaunch recipes copy hierarchical_parallel` makes one to change",) == found.hints
    assert Blame.COMMAND_LINE == found.blame


def test_a_recipe_that_is_edited_is_read_anew_and_one_that_is_not_is_the_same(here):
    make_recipe(here / "mine", "First.")
    found = find_recipe("mine", working_folder=here)
    first = load_recipe(found)
    assert first is load_recipe(found)
    (here / "mine/recipe.py").write_text(DECLARATION.format(summary="Another one."))
    assert "Another one." == load_recipe(found).summary


def test_two_recipes_of_one_name_in_two_folders_are_two(here):
    make_recipe(here / "a/mine", "First.")
    make_recipe(here / "b/mine", "Second.")
    names = ["a/mine", "b/mine", "a/mine"]
    summaries = [load_recipe(find_recipe(name, working_folder=here)).summary for name in names]
    assert summaries == ["First.", "Second.", "First."]


def test_a_missing_recipe_is_a_diagnostic_that_lists_the_others(here):
    make_recipe(here / "recipes/aaa")
    found = find_recipe("mine", working_folder=here)
    assert isinstance(found, Diagnostic)
    names = [recipe.name for recipe in list_recipes(here)]
    assert "aaa" == names[0]
    shown = ", ".join(f"`{name}`" for name in names[:8])
    assert (f"recipes here: {shown}, … ({len(names)} in all)",) == found.notes


@pytest.mark.parametrize("roles", [{}, {"a": None, "b": None}], ids=["none", "two-open"])
def test_a_layout_has_roles_and_at_most_one_of_open_size(roles):
    with pytest.raises(ValueError, match="needs at least one role and at most one of open size"):
        Layout("odd", **roles)


@pytest.mark.parametrize("count", ["two", 2.5, 0, -1, True], ids=repr)
def test_a_number_of_ranks_is_a_whole_number_of_at_least_1(count):
    with pytest.raises(
        ValueError, match=r"layout 'odd' gives role `peer` .* ranks; a number of at least 1, `per\(…\)` or"
    ):
        Layout("odd", peer=count)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"config": TrainingFile()}, "`config` is .*; a class that is derived from `ConfigFile` was expected"),
        ({"config": dict}, "`config` is <class 'dict'>; a class"),
        (
            {"config": ConfigFile},
            "`uses_data` is True, but `ConfigFile` has no `data_config`: derive it from `TrainingFile`",
        ),
        ({"traffic": "bytes"}, "`traffic` is 'bytes'; a function was expected"),
    ],
)
def test_a_field_of_another_kind_is_named_before_anything_is_planned(changed, said):
    with pytest.raises((TypeError, ValueError), match=said):
        Recipe(**{"summary": "", "config": TrainingFile, "layouts": [Layout("all", client=1)]} | changed)


def test_flows_are_between_roles_that_exist():
    with pytest.raises(ValueError, match="flows name roles that no layout has: server"):
        Recipe(summary="", config=TrainingFile, layouts=[Layout("all", client=1)], flows=[("client", "server")])


def test_a_recipe_has_a_layout():
    with pytest.raises(ValueError, match="a recipe needs at least one layout"):
        Recipe(summary="", config=TrainingFile, layouts=[])


@pytest.mark.parametrize(("world_size", "count"), [(None, 2), (4, 3), (1, 0)])
def test_a_role_of_open_size_gets_what_the_others_leave(world_size, count):
    layout = Layout("all", server=1, peer=None)
    assert layout.counts(TrainingFile(), world_size=world_size) == {"server": 1, "peer": count}


def test_a_number_of_ranks_may_be_a_value_or_a_length():
    layout = Layout(
        "x", a=per("multihost_config.num_workers"), b=per("multihost_config.pipeline_parallel_config.blocks_per_rank")
    )
    config = TrainingFile.model_validate(
        {"multihost_config": {"pipeline_parallel_config": {"blocks_per_rank": [1, 2, 1]}}}
    )
    assert layout.counts(config) == {"a": 2, "b": 3}
    assert layout.counts(TrainingFile()) == {"a": 2, "b": 0}
