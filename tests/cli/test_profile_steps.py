"""`--profile-steps`: what cannot be recorded is refused before anything starts (E7)."""

import pytest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data_parallel --profile-steps 7-5", "`--profile-steps 7-5` names no steps"),
        ("data_parallel --profile-steps all", "`--profile-steps all` names no steps"),
        (
            "data_parallel --profile-steps 151-160",
            "`--profile-steps 151-160` begins after the end: the last step of this run is 150",
        ),
        ("--profile-steps 2 -- ./prog", "`--profile-steps` was given, but prog is a program and no recipe"),
    ],
)
def test_steps_that_are_none_of_the_run_are_refused(ttlaunch, here, words, message):
    (here / "prog").write_text("#!/bin/sh\n")
    (here / "prog").chmod(0o755)
    answer = ttlaunch(f"run {words}")

    assert (2, "") == (answer.status, answer.stdout)
    assert f"error[P009]: {message}" == answer.stderr.splitlines()[0]
    assert not (here / "runs").exists()


def test_the_steps_are_part_of_the_plan(ttlaunch):
    answer = ttlaunch("run data_parallel --profile-steps 2-3 --dry-run --format json")

    assert '"TTLAUNCH_PROFILE_STEPS": "2-3"' in answer.stdout
