"""`ttlaunch recipes`: a built-in training file is shown and copied with every key, one's own as it was written."""

import json
import shutil
from pathlib import Path

import pytest

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


def test_a_naive_form_is_planned_with_its_own_layout_and_without_checkpoints(ttlaunch):
    answer = ttlaunch("plan data_parallel --naive --format json")
    plan = json.loads(answer.stdout)
    assert (0, "naive", True) == (answer.status, plan["layout"], plan["naive"])
    assert plan["config"]["checkpoint_config"]["interval"] is None
    assert "naive" not in json.loads(ttlaunch("plan data_parallel --format json").stdout)


def test_a_recipe_is_shown_with_its_naive_form(ttlaunch):
    said = ttlaunch("recipes show hierarchical_parallel").stdout.splitlines()
    assert "naive form, with --naive: worker × multihost_config.num_workers, aggregator × 1, optimizer × 1" in said
    shown = json.loads(ttlaunch("recipes show hierarchical_parallel --format json").stdout)
    assert {"naive": {"worker": "multihost_config.num_workers", "aggregator": 1, "optimizer": 1}} == shown["naive"]
    assert json.loads(ttlaunch("recipes show fabric_minimal --format json").stdout)["naive"] is None


@pytest.mark.parametrize("command", ["show local --recipe data_parallel", "place data_parallel --on 2loudboxes"])
def test_commands_that_arrange_ranks_know_the_naive_form(ttlaunch, command):
    assert "data_parallel (naive)" in ttlaunch(f"{command} --naive").stdout


def test_naive_of_a_recipe_without_a_naive_form_is_refused(refused):
    refused("run fabric_minimal --naive", status=3)


def test_naive_of_a_recipe_whose_file_is_missing_is_refused(refused, here, ttlaunch):
    assert 0 == ttlaunch("recipes copy data_parallel mine").status
    (here / "mine/naive.py").unlink()
    refused("plan mine --naive", status=3)


def test_naive_with_resume_is_refused(refused):
    refused("run data_parallel --naive --resume latest", status=3)


def test_naive_with_what_the_naive_form_cannot_do_is_refused(refused):
    text = (
        "compression_config:\n  kind: int8\ntraining_config:\n  early_stop_patience: 2\n  log_layer_grad_norms: true\n"
    )
    refused("simulate data_parallel --naive -c train.yaml", files={"train.yaml": text}, status=3)


def test_naive_of_a_program_is_refused(refused):
    refused("run work.py --naive", files={"work.py": "pass\n"}, status=2)


def test_a_copy_has_the_naive_form_and_runs_it(ttlaunch, here):
    assert 0 == ttlaunch("recipes copy local_sgd mine").status
    assert (here / "mine/naive.py").is_file()
    answer = ttlaunch("plan mine --naive --format concise")
    assert (0, 2) == (answer.status, len(answer.stdout.splitlines()))
