"""`--independent`: what the plan keeps of it, and what it is refused for."""

import json

import pytest


@pytest.fixture
def plan(ttlaunch, here):
    def plan(options):
        (here / "train.py").write_text("")
        answer = ttlaunch(f"plan {options} --format json train.py")
        assert 0 == answer.status, answer.stderr
        return json.loads(answer.stdout)

    return plan


def test_a_plan_keeps_and_shows_that_ranks_train_by_themselves(plan):
    independent = plan("-n 2 --independent")
    assert independent["independent"]
    assert "each rank is meant to train by itself" in independent["remarks"]


def test_a_plan_without_the_option_says_nothing_of_it(plan):
    assert "independent" not in plan("-n 2")


def test_a_recipe_whose_ranks_train_one_model_is_refused(ttlaunch, here):
    answer = ttlaunch("plan data_parallel --independent")
    assert 2 == answer.status
    assert "`--independent` is for scripts; data_parallel is a recipe, whose ranks train one model" in answer.stderr
