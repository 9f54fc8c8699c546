"""What is compared: recipes with changes of their own, on one workload (D16)."""

import pytest
import yaml

from ttlaunch.planning.comparison import Candidate, Workload, parse_candidate


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        ("zero", Candidate("zero"), "zero"),
        ("my_recipe/", Candidate("my_recipe/"), "my_recipe/"),
        ("zero:zero_config.zero_stage=3", Candidate("zero", ("zero_config.zero_stage=3",)), "zero (zero_stage=3)"),
        (
            "p:a.b=[1,2],c.d={x: 1, y: 2},e=0.5",
            Candidate("p", ("a.b=[1,2]", "c.d={x: 1, y: 2}", "e=0.5")),
            "p (b=[1,2], d={x: 1, y: 2}, e=0.5)",
        ),
        ("C:folder", Candidate("C:folder"), "C:folder"),
    ],
)
def test_a_recipe_may_have_changes_of_its_own(text, expected, shown):
    found = parse_candidate(text)

    assert (expected, shown) == (found, str(found))


def test_every_recipe_gets_the_same_model_data_and_seed_and_its_own_changes_last():
    """D16."""
    workload = Workload(20, ("training_config.batch_size=8",))
    arguments = Candidate("zero", ("training_config.seed=1",)).arguments(workload, on="local")

    settings = [word.partition("=") for word in arguments[2::2]]
    assert ["zero", "--set"] == arguments[:2]
    assert {"--set"} == set(arguments[1::2])
    assert ["training_config.batch_size", "training_config.seed"] == [key for key, _, _ in settings[-2:]]
    sections = {key: yaml.safe_load(value) for key, _, value in settings[:-2]}
    assert {"training_config", "transformer_config", "scheduler_config", "checkpoint_config"} == set(sections)
    assert (20, 0) == (sections["training_config"]["steps"], sections["training_config"]["seed"])
    assert ["--on", "far"] == Candidate("zero").arguments(workload, on="far")[1:3]
