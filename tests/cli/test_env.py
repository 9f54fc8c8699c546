"""`--env`: what is wrong with it is said without its value, and the plan has the variable."""

import json

import pytest


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "1X=2": "error[T039]: `--env 1X` does not name an environment variable",
        "=2": "error[T039]: `--env =…` does not name an environment variable",
        "NOT_THERE": "error[T025]: `--env NOT_THERE` takes the value of `NOT_THERE`, which is not defined in this shell",
        "A=env:NOT_THERE": "error[T025]: `--env A` takes the value of `NOT_THERE`, which is not defined in this shell",
        "TTLAUNCH_RANK=5": "error[P009]: `--env TTLAUNCH_RANK` has no effect: ttlaunch itself sets the variables `TTLAUNCH_…`",
    }.items(),
)
def test_a_variable_that_cannot_be_set_is_refused_as_a_mistake_on_the_command_line(ttlaunch, text, said):
    answer = ttlaunch(["plan", "data_parallel", "--env", text])
    assert (2, "", said) == (answer.status, answer.stdout, answer.stderr.partition("\n")[0])


def test_the_value_of_a_variable_with_a_wrong_name_is_not_shown(ttlaunch):
    answer = ttlaunch(["plan", "data_parallel", "--env", "MY TOKEN=canary"])
    assert 2 == answer.status
    assert "canary" not in answer.stderr


def test_a_nearly_known_name_is_a_warning(ttlaunch):
    answer = ttlaunch(["plan", "data_parallel", "--env", "PYTHONPAHT=x"])
    assert 0 == answer.status
    assert "did you mean `PYTHONPATH`?" in answer.stderr


def test_the_plan_has_the_variable_and_hides_a_secret(ttlaunch):
    answer = ttlaunch("plan data_parallel --format json --env OMP_NUM_THREADS=1 --env HF_TOKEN=canary")
    assert 0 == answer.status, answer.stderr
    environment = json.loads(answer.stdout)["environment"]
    assert ("1", "env:TTLAUNCH_SECRET_0") == (environment["OMP_NUM_THREADS"], environment["HF_TOKEN"])
    assert "canary" not in answer.stdout
