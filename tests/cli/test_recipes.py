"""`ttlaunch recipes`: a built-in training file is shown and copied with every key, one's own as it was written."""

import json
import shutil
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def configuration(answer):
    assert (0, "") == (answer.status, answer.stderr)
    return json.loads(answer.stdout)["config"]


def test_a_copy_has_every_key_and_plans_the_same_configuration(ttlaunch, here):
    answer = ttlaunch("recipes copy classic_dp recipes/mine")
    assert (0, "") == (answer.status, answer.stderr)
    text = (here / "recipes/mine/train.yaml").read_text()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "seed: 0 # seed of weights, data order and dropout" in lines
    why = "beta1: 0.5 # AdamW: decay of the mean of gradients; less than 0.9, since staleness is momentum, too"
    assert why in lines
    assert (RECIPES / "classic_dp/trainer.py").read_text() == (here / "recipes/mine/trainer.py").read_text()
    plan = "plan {} --format json"
    assert configuration(ttlaunch(plan.format("classic_dp"))) == configuration(ttlaunch(plan.format("mine")))


def test_a_recipe_is_shown_with_the_file_that_a_copy_gets(ttlaunch, here):
    ttlaunch("recipes copy zero mine")
    assert ttlaunch("recipes show zero").stdout.endswith("\n# train.yaml\n" + (here / "mine/train.yaml").read_text())


def test_the_file_of_ones_own_recipe_is_shown_and_copied_as_it_was_written(ttlaunch, here):
    shutil.copytree(RECIPES / "zero", here / "recipes/mine")
    text = "# mine\ntraining_config: {steps: 3}\n"
    (here / "recipes/mine/train.yaml").write_text(text)
    assert 0 == ttlaunch("recipes copy mine other").status
    assert text == (here / "other/train.yaml").read_text()
    assert ttlaunch("recipes show mine").stdout.endswith("\n# train.yaml\n" + text)
