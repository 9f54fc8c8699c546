"""Any program runs under a plan: what stands after `--` is taken as it was typed."""

import json

import pytest

pytestmark = pytest.mark.mpi


def test_a_command_after_dashes_runs_on_every_rank_as_it_was_typed(ttlaunch, here):
    command = 'echo "$TTLAUNCH_RANK of $TTLAUNCH_WORLD_SIZE: $0"'

    answer = ttlaunch(["run", "--ranks", "2", "--", "sh", "-c", command, "--on x"])

    assert 0 == answer.status
    lines = [line for line in answer.stdout.splitlines() if line.startswith("rank ")]
    assert ["rank 0 rank | 0 of 2: --on x", "rank 1 rank | 1 of 2: --on x"] == sorted(lines)


def test_arguments_of_a_script_follow_dashes(ttlaunch, here):
    (here / "show.py").write_text("import sys; print(sys.argv[1:])")

    answer = ttlaunch(["run", "show.py", "--", "--steps", "3"])

    assert "rank 0 rank | ['--steps', '3']" in answer.stdout.splitlines()


def test_a_command_that_fails_is_named_with_its_status(ttlaunch, here):
    answer = ttlaunch(["run", "--ranks", "2", "--format", "json", "--", "sh", "-c", "exit $((4 * TTLAUNCH_RANK))"])

    assert 1 == answer.status
    failure = json.loads(answer.stdout)["failure"]
    assert (1, "exited with status 4") == (failure["rank"], failure["cause"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./notes.txt", "`./notes.txt` is not executable\n\nhint: `chmod +x ./notes.txt` makes it a program"),
        ("./things", "`./things` is a folder and no program\n\nhint: a recipe's folder goes before `--`\n"),
    ],
)
def test_a_file_that_is_no_program_is_not_said_to_be_missing(ttlaunch, here, name, said):
    (here / "notes.txt").write_text("echo 1\n")
    (here / "things").mkdir()
    answer = ttlaunch(["run", "--", name])
    assert (answer.status, answer.stderr.startswith(f"error[P009]: {said}")) == (2, True), answer.stderr


def test_a_program_that_is_not_there_is_refused(ttlaunch, here):
    answer = ttlaunch(["run", "--", "nonesuch", "--x"])

    assert 2 == answer.status
    assert (
        "error[P009]: there is no program `nonesuch` to run\n\nhint: a recipe's name goes before `--`\n\n"
    ) == answer.stderr
    assert not (here / "runs").exists()
