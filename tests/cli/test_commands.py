"""Any program runs under a plan: what stands after `--` is taken as it was typed."""

import json
import os

import pytest

pytestmark = pytest.mark.mpi


@pytest.mark.core
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


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("pipe", "t.py is no regular file, and so no script"),
        ("folder", "t.py is a folder and no script"),
        ("link", "t.py is a link to a file that does not exist"),
        ("nothing", "there is no script t.py"),
    ],
)
def test_what_is_no_script_is_said_to_be_what_it_is(ttlaunch, here, kind, said):
    make = {
        "pipe": os.mkfifo,
        "folder": os.mkdir,
        "link": lambda path: path.symlink_to("gone"),
        "nothing": lambda _: None,
    }
    make[kind](here / "t.py")
    answer = ttlaunch("run t.py")
    assert (2, f"error[P009]: {said}") == (answer.status, answer.stderr.splitlines()[0])


def test_a_path_to_a_program_that_is_not_there_is_not_answered_with_recipes(ttlaunch, here):
    for program, hint in (
        ("/nonexistent/sh", "hint: `-- sh` is /"),
        ("./nonesuch", "hint: a relative path begins in the folder where the command is typed"),
    ):
        answer = ttlaunch(["run", "--", program, "x"])
        assert (2, True) == (answer.status, hint in answer.stderr), answer.stderr
    assert not (here / "runs").exists()


def test_the_number_of_threads_is_said_once_in_a_run_of_several_ranks(ttlaunch, here, monkeypatch):
    # It counts as a script that imports torch, and ends before it does.
    (here / "work.py").write_text("raise SystemExit\nimport torch\n")
    (here / "plain.py").write_text("")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    note = "note: ranks that share a host get OMP_NUM_THREADS=1"
    assert 1 == ttlaunch("run work.py -n 2").stderr.count(note)
    assert "" == ttlaunch("run work.py").stderr
    assert "" == ttlaunch("run plain.py -n 2").stderr
    assert "" == ttlaunch("run work.py -n 2 --env OMP_NUM_THREADS=2").stderr
    assert "" == ttlaunch("run work.py -n 2 --format json").stderr


def test_a_program_that_is_not_there_is_refused(ttlaunch, here):
    answer = ttlaunch(["run", "--", "nonesuch", "--x"])

    assert 2 == answer.status
    assert (
        "error[P009]: there is no program `nonesuch` to run\n\nhint: a recipe's name goes before `--`\n\n"
    ) == answer.stderr
    assert not (here / "runs").exists()
