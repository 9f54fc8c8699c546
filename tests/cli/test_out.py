"""Where a command writes is named `--out` in every command; the former names still work."""

import pytest
from typer.main import get_command

from ttlaunch.cli.main import app

FORMER = {
    "plan data_parallel": ("--write", "made/plan.json"),
    "place data_parallel --on 2loudboxes": ("--write", "made/hosts.txt"),
    "schema": ("--write", "made/mgd.schema.json"),
    "show": ("--svg", "made"),
    "init lab --hosts a": ("--dir", "made/lab/hosts.txt"),
}


@pytest.mark.parametrize("line", FORMER)
@pytest.mark.parametrize("form", ["--out made", "-o made", "--out=made", "{} made", "{}=made"])
def test_every_command_writes_where_out_says_under_its_new_and_its_former_name(ttlaunch, here, line, form):
    former, file = FORMER[line]
    answer = ttlaunch(f"{line} {form.format(former)}")
    assert 0 == answer.status, answer.stderr
    assert (here / file).is_file()


@pytest.mark.parametrize(
    "line", ["simulate data_parallel --keep taken", "parity --simulate --results taken/x", "compare --out taken"]
)
def test_commands_that_train_know_the_name_too(ttlaunch, here, line):
    (here / "taken").write_text("")
    answer = ttlaunch(line)
    assert (2, "taken") == (answer.status, answer.stderr.partition(": ")[2][:5])


def test_the_words_of_a_program_are_not_renamed(ttlaunch):
    assert '"--write"' in ttlaunch("plan --format json -- sh -c true --write").stdout


def test_no_command_shows_another_name_for_where_it_writes():
    commands = get_command(app).commands
    every = [one for command in commands.values() for one in getattr(command, "commands", {"": command}).values()]
    shown = {
        name: one.help for command in every for one in command.params for name in one.opts if name.startswith("--")
    }
    others = {"--write", "--svg", "--keep-in", "--results", "--dir", "--output", "--to-file"}
    assert set() == others & set(shown)


def test_a_picture_is_not_written_under_a_name_that_promises_another_kind(ttlaunch, here):
    answer = ttlaunch("show --out cluster.PNG")
    assert (2, "") == (answer.status, answer.stdout)
    expected = "error[P009]: `--out cluster.PNG`: pictures are SVG, not PNG\n\nhint: end it in `.svg`\n\n"
    assert expected == answer.stderr
    assert not (here / "cluster.PNG").exists()
