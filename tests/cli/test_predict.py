"""`ttlaunch plan --predict`: what is shown before anything starts (E9)."""

import json

import pytest


@pytest.mark.usefixtures("forked_predictions")
def test_a_prediction_has_bytes_of_tensors_and_of_messages_and_the_formula(ttlaunch):
    tiny = (
        "--set training_config.steps=1 --set transformer_config.embedding_dim=16 --set transformer_config.num_heads=2"
    )
    answer = ttlaunch(f"plan data_parallel {tiny} --predict --format json")

    assert (0, "") == (answer.status, answer.stderr)
    content = json.loads(answer.stdout)
    found, (first, second) = content["prediction"], content["prediction"]["ranks"]
    assert (None, None) == (content["not_predicted"], found["no_flows"])
    assert first["held"] == first["formula"] == second["held"]
    assert sum(first["held"].values()) < first["peak"] <= sum(first["sizes"].values())
    values = first["formula"]["parameters"] // 4
    between = [one for one in found["flows"] if one["operation"] == "gradients"]
    assert 2 * 4 * values == sum(one["per_step"] for one in between)  # 2 (W - 1)/W of S from each of two


def test_the_memory_of_a_program_is_not_predicted(ttlaunch):
    answer = ttlaunch("plan --predict -- true")

    assert (2, "") == (answer.status, answer.stdout)
    assert "error[P009]: `--predict` was given, but true is a program and no recipe" == answer.stderr.splitlines()[0]


def test_a_recipe_that_needs_processes_is_planned_all_the_same(ttlaunch):
    answer = ttlaunch("plan fully_sharded --predict")

    assert 0 == answer.status
    reason = "with `multihost_config.enabled: true` each rank needs its own process"
    assert f"  not predicted: {reason}" in answer.stdout.splitlines()
