"""`ttlaunch chaos` says what is wrong with its plan before anything starts, with status 2."""

import re

import pytest

from ttlaunch.cli import chaos

HINT = '\nhint: `--plan "kill rank=2 at step=5"` orders a fault, `--random 1` draws one\n\n'
WRONG = {
    "": "error[P039]: no fault is ordered\n",
    '--random 2 --plan "interrupt at 1s"': "error[P039]: faults are ordered by `--plan` and drawn by `--random`\n",
}


@pytest.mark.parametrize("options", WRONG)
def test_one_plan_is_expected(ttlaunch, options):
    answer = ttlaunch(f"chaos fabric_minimal {options}")
    assert (2, "", WRONG[options] + HINT) == (answer.status, answer.stdout, answer.stderr)


def test_a_file_that_cannot_be_read_is_named(ttlaunch, here):
    answer = ttlaunch("chaos fabric_minimal --plan @faults.txt")
    message = "error[P032]: faults.txt cannot be read: no such file or directory\n\n"
    message += "hint: check its spelling, and the folder that it is in\n\n"
    assert (2, message) == (
        answer.status,
        answer.stderr,
    )
    (here / "faults.txt").write_bytes(b"\xff")
    answer = ttlaunch("chaos fabric_minimal --plan @faults.txt")
    assert (2, "error[P039]: faults.txt is no plan of faults: it is not text in UTF-8\n" + HINT) == (
        answer.status,
        answer.stderr,
    )


def test_mistakes_in_a_file_are_shown_at_their_lines_all_at_once(ttlaunch, here):
    (here / "faults.txt").write_text("# first\nkill rank=7 at step=5\ncut host=localhost at 1s; kil mpirun at 3s\n")
    answer = ttlaunch("chaos fabric_minimal -n 2 --plan @faults.txt --format concise")
    assert 2 == answer.status
    assert [
        "faults.txt:3:27: error[P035]: unknown fault `kil`",
        "faults.txt:2:6: error[P037]: `rank=7` is not in this run",
        "faults.txt:3:5: error[P037]: `cut host=localhost` needs a run over hosts",
    ] == [re.sub(r" \(.*", "", line) for line in answer.stderr.splitlines()]


@pytest.mark.parametrize("plan", [plan for plan in re.findall(r'--plan "(.*?)"', chaos.EXAMPLES) if "host" not in plan])
def test_the_plans_of_the_help_are_read_and_fit_a_run(ttlaunch, plan):
    answer = ttlaunch(["chaos", "hierarchical_parallel", "--plan", f"{plan}; kill rank=99 at 1s"])
    assert (2, 1) == (answer.status, answer.stderr.count("error[")), answer.stderr
    assert answer.stderr.startswith("error[P037]: `rank=99` is not in this run\n")
