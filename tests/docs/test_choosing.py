"""The page that helps to choose speaks of every recipe, and its table is what `ttlaunch compare` has measured (D16)."""

import json
import re
from pathlib import Path

from ttlaunch.cli.compare_picture import draw_comparison
from ttlaunch.diagnostics import Diagnostic
from ttlaunch.lab.comparison.summary import HEADING
from ttlaunch.spec.recipe.discovery import list_recipes, load_recipe

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "choosing.md"


def training_recipes(folder):
    loaded = {one.name: load_recipe(one) for one in list_recipes(folder)}
    assert [] == [name for name, recipe in loaded.items() if isinstance(recipe, Diagnostic)]
    return {name for name, recipe in loaded.items() if recipe.uses_data}


def table(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_recipe_that_trains_has_its_place_in_the_choice(tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    promised = re.search(r"## What they promise\n(.*?)\n## ", text, re.DOTALL)[1]

    named = {row[0].strip("`") for row in table(promised)[1:]}
    assert set() == training_recipes(tmp_path) - named


def test_the_measured_table_is_that_of_the_comparison(tmp_path):
    """D16: generated from runs."""
    text = PAGE.read_text(encoding="utf-8")
    rows = table(re.search(r"<!-- measured -->\n(.*?)<!-- /measured -->", text, re.DOTALL)[1])
    content = json.loads(PAGE.with_name("comparison.json").read_text(encoding="utf-8"))

    assert list(HEADING) == rows[0]
    assert [row["name"] for row in content["rows"]] == [row[0] for row in rows[2:]]
    for measured, shown in zip(content["rows"], rows[2:], strict=True):
        assert measured["error"] is None
        assert f"{measured['loss']['median']:.3f}" == shown[4]
        assert f"{measured['bytes_per_step']['median'] / 1e6:.2f}" == shown[5].removeprefix("≈ ")
        assert len(measured["runs"]) == content["workload"]["repeats"]
        assert measured["name"].partition(" ")[0] in training_recipes(tmp_path)


def test_the_picture_is_that_of_the_comparison():
    content = json.loads(PAGE.with_name("comparison.json").read_text(encoding="utf-8"))
    assert draw_comparison(content) == PAGE.with_name("comparison.svg").read_text(encoding="utf-8")
