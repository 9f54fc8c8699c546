"""Recipes of the current folder that nobody named: their code runs apart and not for long, and none hides a built-in one unseen."""

import json
import os
import time

import pytest

from ttlaunch.app.inspect_recipes import inspect_recipes

ENDLESS = "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)\n"


@pytest.fixture
def recipe(here):
    """`recipe(name, text)`: a recipe of the current folder whose `recipe.py` is that text."""

    def make(name, text):
        folder = here / "recipes" / name
        folder.mkdir(parents=True)
        (folder / "recipe.py").write_text(text)
        (folder / "trainer.py").write_text("")

    return make


def listed(ttlaunch):
    return {row["name"]: row for row in json.loads(ttlaunch("recipes list --format json").stdout)["recipes"]}


def test_a_recipe_that_never_ends_is_given_up_and_the_others_are_listed(recipe, here):
    for number in range(3):
        recipe(f"endless_{number}", ENDLESS)
    began = time.monotonic()
    found = {one.found.name: one for one in inspect_recipes(here, limit_s=2.0)}
    assert time.monotonic() - began < 20
    message = "recipe `endless_1` cannot be read: recipe.py did not end within 2 s"
    assert (message, "") == (found["endless_1"].mistake, found["zero"].mistake)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\nos._exit(0)\n", "recipe.py ended its process with status 0"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "recipe.py ended its process with status -9"),
        ("import sys\nsys.stdout.write('[' * 10**6)\nsys.exit(3)\n", "SystemExit: 3"),
        ("import os\nos.write(1, b'[' * 10**6)\nos._exit(0)\n", "recipe.py ended its process with status 0"),
    ],
)
def test_a_recipe_that_ends_its_process_ends_no_list(recipe, ttlaunch, text, words):
    recipe("mine", text)
    rows = listed(ttlaunch)
    assert words in rows["mine"]["summary"]
    assert rows["zero"]["summary"]


def test_a_list_imports_no_recipe_of_the_current_folder_itself(recipe, ttlaunch, here):
    recipe("mine", "import os, pathlib\npathlib.Path('who').write_text(str(os.getpid()))\n")
    for line in ("recipes list", "schema --out schemas"):
        ttlaunch(line)
        assert int((here / "who").read_text()) != os.getpid()


def test_modules_of_the_current_folder_are_not_imported_in_place_of_pythons(recipe, ttlaunch, here):
    recipe("mine", "")
    for name in ("json", "pydantic", "sitecustomize"):
        (here / f"{name}.py").write_text("import pathlib\npathlib.Path('imported').touch()\n")
    listed(ttlaunch)
    assert not (here / "imported").exists()


def test_a_recipe_that_hides_a_built_in_one_is_marked_in_the_list(ttlaunch):
    ttlaunch("recipes copy zero")
    rows = listed(ttlaunch)
    hiding = {
        name: (row["hides_built_in"], row["built_in"]) for name, row in rows.items() if name in {"zero", "diloco"}
    }
    assert {"zero": (True, False), "diloco": (False, True)} == hiding
    [line] = [line for line in ttlaunch("recipes list").stdout.splitlines() if line.startswith("zero ")]
    assert "(./recipes/zero, which hides the built-in one)" in line


def test_a_run_says_that_its_recipe_hides_a_built_in_one(ttlaunch, here):
    ttlaunch("recipes copy zero")
    answer = ttlaunch("plan zero")
    note = f"warning[P051]: the recipe `zero` is the one in {here}/recipes/zero"
    assert (0, note) == (answer.status, answer.stderr.splitlines()[0])
    assert "P051" not in ttlaunch("plan recipes/zero").stderr
